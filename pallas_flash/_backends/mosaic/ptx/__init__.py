"""Operations that Pallas lacks, in PTX, and what they are for.

layouts     layouts of tiles in registers and in memory
products    products of tiles (wgmma), and waits for them
memory      reads and writes of memory, fences and named barriers
cluster     messages between the CTAs of a cluster
arithmetic  arithmetic on tiles
registers   the registers of one thread, for the other modules

A warpgroup is 128 threads. Tiles of scores and of the output are 64 rows of one warpgroup, spread
over its registers as the matrix instruction `wgmma` leaves them: layout `ACC` while a product may
still be running, `WGMMA` otherwise. A thread holds two rows, and of each 8 columns two. Loops carry
sums in layout `WGMMA`, two numbers in each register of MLIR, because MLIR takes time that grows
with the square of the number of carried registers.

A percentage is a gain in the time of a whole pass, measured on an H200, mostly with prototypes.

    product_t, accumulate   a first instruction that overwrites the accumulators, so that they need
                            not be zeroed; K/V blocks that are no multiple of 64: 80 and 176 keys,
                            the latter 6 to 12 % at head dim 128
    product_t, product_of_transposed
                            the same in the backward: 5 to 7 % at head dim 64, 0 to 2 % at head
                            dim 128, 3 % at head dim 256
    wait                    products in flight under a softmax that the compiler leaves there: 5 %
                            at head dim 64
    uniform_zero            without it the compiler moves these waits up
    rescale                 5 to 9 % at head dims 128 and 256, with THRESHOLD of `forward_common`
    add_fragments           4 % of the backward, against adding through shared memory
    load_fragments          sums become rows at 4 TB/s; XLA's transposition reaches 3.4 TB/s
    count_up                Pallas has no atomic addition that says what was there before
    await_count, raise_count
                            Pallas cannot wait for a number in device memory
    anew                    no spills in dq at head dim 256, nor by masks at head dim 64
    meet, fence             two barriers fewer for each tile of the backward; right results where
                            wgmma or a copy follows what threads wrote or read
    joined                  a tile in parts, which the compiler computes one by one
    positions               no division for each element, where a tile's width is no power of two
    gather, bits, bits_of_tile
                            Pallas cannot gather an element of device memory for each of a tile
    halves_of_neighbours    Pallas cannot exchange registers: half as many words of dropout where
                            rows are keys
    load_transposed         Pallas cannot load a tile whose rows become columns
    load_strips, put_strips Pallas cannot load a tile whose copies reach beyond an array's end
    store_rows, store_zeros, zero_rows
                            Pallas cannot store a part of a tile, or 16 bytes at a time
    logistic, columns_to_float
                            fewer instructions of the units for exponentials: with a soft cap 15 %
                            of the forward at head dim 128
    start_messages, expect_message, wait_for_message, send_words, take_words, send_tile
                            Pallas cannot write to the shared memory of another CTA of a cluster
    where, difference, tanh, multiply_wide
                            roundings and instructions that the compiler would not choose
"""

from pallas_flash._backends.mosaic.ptx.arithmetic import LOGISTIC as LOGISTIC
from pallas_flash._backends.mosaic.ptx.arithmetic import LOGISTIC_APART as LOGISTIC_APART
from pallas_flash._backends.mosaic.ptx.arithmetic import PRODUCT as PRODUCT
from pallas_flash._backends.mosaic.ptx.arithmetic import TANH as TANH
from pallas_flash._backends.mosaic.ptx.arithmetic import anew as anew
from pallas_flash._backends.mosaic.ptx.arithmetic import columns as columns
from pallas_flash._backends.mosaic.ptx.arithmetic import columns_to_float as columns_to_float
from pallas_flash._backends.mosaic.ptx.arithmetic import difference as difference
from pallas_flash._backends.mosaic.ptx.arithmetic import (
    halves_of_neighbours as halves_of_neighbours,
)
from pallas_flash._backends.mosaic.ptx.arithmetic import joined as joined
from pallas_flash._backends.mosaic.ptx.arithmetic import logistic as logistic
from pallas_flash._backends.mosaic.ptx.arithmetic import multiply_wide as multiply_wide
from pallas_flash._backends.mosaic.ptx.arithmetic import positions as positions
from pallas_flash._backends.mosaic.ptx.arithmetic import tanh as tanh
from pallas_flash._backends.mosaic.ptx.arithmetic import where as where
from pallas_flash._backends.mosaic.ptx.cluster import expect_message as expect_message
from pallas_flash._backends.mosaic.ptx.cluster import send_tile as send_tile
from pallas_flash._backends.mosaic.ptx.cluster import send_words as send_words
from pallas_flash._backends.mosaic.ptx.cluster import start_messages as start_messages
from pallas_flash._backends.mosaic.ptx.cluster import take_words as take_words
from pallas_flash._backends.mosaic.ptx.cluster import wait_for_message as wait_for_message
from pallas_flash._backends.mosaic.ptx.layouts import ACC as ACC
from pallas_flash._backends.mosaic.ptx.layouts import BLOCKS as BLOCKS
from pallas_flash._backends.mosaic.ptx.layouts import COLUMN as COLUMN
from pallas_flash._backends.mosaic.ptx.layouts import COLUMNS as COLUMNS
from pallas_flash._backends.mosaic.ptx.layouts import GROUP as GROUP
from pallas_flash._backends.mosaic.ptx.layouts import OF_GROUP as OF_GROUP
from pallas_flash._backends.mosaic.ptx.layouts import ROW as ROW
from pallas_flash._backends.mosaic.ptx.layouts import ROWS as ROWS
from pallas_flash._backends.mosaic.ptx.layouts import TILED as TILED
from pallas_flash._backends.mosaic.ptx.layouts import TILED_32 as TILED_32
from pallas_flash._backends.mosaic.ptx.layouts import WGMMA as WGMMA
from pallas_flash._backends.mosaic.ptx.layouts import columns_of as columns_of
from pallas_flash._backends.mosaic.ptx.layouts import groups as groups
from pallas_flash._backends.mosaic.ptx.layouts import strip_width as strip_width
from pallas_flash._backends.mosaic.ptx.layouts import strips as strips
from pallas_flash._backends.mosaic.ptx.layouts import tile_columns as tile_columns
from pallas_flash._backends.mosaic.ptx.layouts import tiled as tiled
from pallas_flash._backends.mosaic.ptx.memory import BITS as BITS
from pallas_flash._backends.mosaic.ptx.memory import FREE_BARRIER as FREE_BARRIER
from pallas_flash._backends.mosaic.ptx.memory import LOG_BITS as LOG_BITS
from pallas_flash._backends.mosaic.ptx.memory import add_fragments as add_fragments
from pallas_flash._backends.mosaic.ptx.memory import await_count as await_count
from pallas_flash._backends.mosaic.ptx.memory import bits as bits
from pallas_flash._backends.mosaic.ptx.memory import bits_of_tile as bits_of_tile
from pallas_flash._backends.mosaic.ptx.memory import count_up as count_up
from pallas_flash._backends.mosaic.ptx.memory import fence as fence
from pallas_flash._backends.mosaic.ptx.memory import gather as gather
from pallas_flash._backends.mosaic.ptx.memory import load_fragments as load_fragments
from pallas_flash._backends.mosaic.ptx.memory import load_strips as load_strips
from pallas_flash._backends.mosaic.ptx.memory import load_transposed as load_transposed
from pallas_flash._backends.mosaic.ptx.memory import meet as meet
from pallas_flash._backends.mosaic.ptx.memory import put_strips as put_strips
from pallas_flash._backends.mosaic.ptx.memory import raise_count as raise_count
from pallas_flash._backends.mosaic.ptx.memory import store_fragments as store_fragments
from pallas_flash._backends.mosaic.ptx.memory import store_rows as store_rows
from pallas_flash._backends.mosaic.ptx.memory import store_zeros as store_zeros
from pallas_flash._backends.mosaic.ptx.memory import unfold as unfold
from pallas_flash._backends.mosaic.ptx.memory import zero_rows as zero_rows
from pallas_flash._backends.mosaic.ptx.products import accumulate as accumulate
from pallas_flash._backends.mosaic.ptx.products import (
    product_of_transposed as product_of_transposed,
)
from pallas_flash._backends.mosaic.ptx.products import product_t as product_t
from pallas_flash._backends.mosaic.ptx.products import rescale as rescale
from pallas_flash._backends.mosaic.ptx.products import uniform_zero as uniform_zero
from pallas_flash._backends.mosaic.ptx.products import wait as wait
