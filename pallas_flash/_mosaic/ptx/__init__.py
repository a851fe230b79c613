"""What Pallas has no operation for, in PTX; every piece with what it gains.

layouts     how tiles lie in registers and in memory
products    of tiles, and waiting for them
memory      reading and writing it, and who waits for that
arithmetic  of tiles
registers   those of one thread, for the others

A warpgroup is 128 threads. Tiles of scores and of the output are 64 rows of one warpgroup, spread
over its registers as the matrix instruction `wgmma` leaves them: layout `ACC` while a product may
still be running, `WGMMA` otherwise. A thread holds two rows, and of each 8 columns two.

Gains were measured on an H200, most of them with prototypes, as the time of a whole pass.

    product_t, accumulate   a first instruction that overwrites in place of zeroed accumulators, and
                            key tiles that are no multiple of 64: 80 and 176 keys, the latter 6 to
                            12 % at head size 128
    product_t, product_of_transposed
                            likewise in the backward: 5 to 7 % at head size 64, 0 to 2 at 128,
                            3 at 256
    wait, waited            products in flight under a softmax that the compiler leaves there: 5 %
                            at head size 64
    uniform_zero            likewise: without it the waits move up
    rescale                 5 to 9 % at head sizes 128 and 256, with THRESHOLD of `forward_common`
    add_fragments           4 % of the backward, against adding through shared memory
    load_fragments          what was added is rows again at 4 TB/s, by XLA's transposition at 3.4
    count_up                Pallas has no atomic addition that says what was there before
    anew                    no spills in dq at head size 256, nor by masks at 64
    meet, fence             two barriers fewer for each tile of the backward
    joined                  a tile of parts, which the compiler computes one after the other
    positions               no division for each element, where a tile's width is no power of two
    gather, bits, bits_of_tile
                            Pallas reads no element of device memory for each one of a tile
    load_transposed         nor a tile whose rows become columns
    load_strips, put_strips nor a tile to which copies may come that reach beyond an array's end
    store_rows, store_zeros, zero_rows
                            nor does it store a part of one, or 16 bytes at a time
    logistic, columns_to_float
                            fewer instructions of the units for exponentials: with a soft cap 15 %
                            of the forward at head size 128
    where, difference, tanh, multiply_wide
                            roundings, accuracy and instructions that the compiler does not choose
"""

from pallas_flash._mosaic.ptx.arithmetic import LOGISTIC as LOGISTIC
from pallas_flash._mosaic.ptx.arithmetic import LOGISTIC_APART as LOGISTIC_APART
from pallas_flash._mosaic.ptx.arithmetic import PRODUCT as PRODUCT
from pallas_flash._mosaic.ptx.arithmetic import TANH as TANH
from pallas_flash._mosaic.ptx.arithmetic import anew as anew
from pallas_flash._mosaic.ptx.arithmetic import columns as columns
from pallas_flash._mosaic.ptx.arithmetic import columns_to_float as columns_to_float
from pallas_flash._mosaic.ptx.arithmetic import difference as difference
from pallas_flash._mosaic.ptx.arithmetic import joined as joined
from pallas_flash._mosaic.ptx.arithmetic import logistic as logistic
from pallas_flash._mosaic.ptx.arithmetic import multiply_wide as multiply_wide
from pallas_flash._mosaic.ptx.arithmetic import positions as positions
from pallas_flash._mosaic.ptx.arithmetic import tanh as tanh
from pallas_flash._mosaic.ptx.arithmetic import where as where
from pallas_flash._mosaic.ptx.layouts import ACC as ACC
from pallas_flash._mosaic.ptx.layouts import BLOCKS as BLOCKS
from pallas_flash._mosaic.ptx.layouts import COLUMN as COLUMN
from pallas_flash._mosaic.ptx.layouts import COLUMNS as COLUMNS
from pallas_flash._mosaic.ptx.layouts import GROUP as GROUP
from pallas_flash._mosaic.ptx.layouts import OF_GROUP as OF_GROUP
from pallas_flash._mosaic.ptx.layouts import ROW as ROW
from pallas_flash._mosaic.ptx.layouts import TILED as TILED
from pallas_flash._mosaic.ptx.layouts import TILED_32 as TILED_32
from pallas_flash._mosaic.ptx.layouts import WGMMA as WGMMA
from pallas_flash._mosaic.ptx.layouts import columns_of as columns_of
from pallas_flash._mosaic.ptx.layouts import groups as groups
from pallas_flash._mosaic.ptx.layouts import strip_width as strip_width
from pallas_flash._mosaic.ptx.layouts import strips as strips
from pallas_flash._mosaic.ptx.layouts import tile_columns as tile_columns
from pallas_flash._mosaic.ptx.layouts import tiled as tiled
from pallas_flash._mosaic.ptx.memory import BITS as BITS
from pallas_flash._mosaic.ptx.memory import LOG_BITS as LOG_BITS
from pallas_flash._mosaic.ptx.memory import add_fragments as add_fragments
from pallas_flash._mosaic.ptx.memory import bits as bits
from pallas_flash._mosaic.ptx.memory import bits_of_tile as bits_of_tile
from pallas_flash._mosaic.ptx.memory import count_up as count_up
from pallas_flash._mosaic.ptx.memory import fence as fence
from pallas_flash._mosaic.ptx.memory import gather as gather
from pallas_flash._mosaic.ptx.memory import load_fragments as load_fragments
from pallas_flash._mosaic.ptx.memory import load_strips as load_strips
from pallas_flash._mosaic.ptx.memory import load_transposed as load_transposed
from pallas_flash._mosaic.ptx.memory import meet as meet
from pallas_flash._mosaic.ptx.memory import put_strips as put_strips
from pallas_flash._mosaic.ptx.memory import store_fragments as store_fragments
from pallas_flash._mosaic.ptx.memory import store_rows as store_rows
from pallas_flash._mosaic.ptx.memory import store_zeros as store_zeros
from pallas_flash._mosaic.ptx.memory import unfold as unfold
from pallas_flash._mosaic.ptx.memory import zero_rows as zero_rows
from pallas_flash._mosaic.ptx.products import accumulate as accumulate
from pallas_flash._mosaic.ptx.products import product_of_transposed as product_of_transposed
from pallas_flash._mosaic.ptx.products import product_t as product_t
from pallas_flash._mosaic.ptx.products import rescale as rescale
from pallas_flash._mosaic.ptx.products import uniform_zero as uniform_zero
from pallas_flash._mosaic.ptx.products import wait as wait
from pallas_flash._mosaic.ptx.products import waited as waited
