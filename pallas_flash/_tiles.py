"""Tile sizes: how they are written down, checked, and chosen.

A kernel keeps a tile of one side in registers while tiles of the other side pass through shared
memory in a pipeline of `num_stages`. Matrix instructions of Hopper want 64 rows of the tile that
stays for each 4 warps.
"""

import dataclasses
import math

# The kernels that have a tile, by the names of the fields of `TileSizes`.
KERNELS = ("forward", "decode", "dkv", "dk", "dv", "dq")
KEYS_STAY = ("dkv", "dk", "dv")

# Matrix units take no fewer rows and columns.
MIN_ROWS = 16

# With more keys than this few queries have "decode": fewer are not worth a second launch (a round
# number, not timed).
MANY_KEYS = 512
# Few are so many queries, which fit in the smallest tile; or so many of all heads and examples, if
# there are as many keys. They are 64 programs of "forward", and half of a GPU idle.
FEW_QUERIES, FEW_ROWS = 16, 4096


@dataclasses.dataclass(frozen=True)
class Tile:
    """The shape of one kernel's work and how it is launched.

    Attributes:
        block_q: queries in a tile, a power of two from 16 to 256.
        block_kv: keys and values in a tile, a power of two from 16 to 256.
        num_warps: warps of 32 threads in a program: 1, 2, 4, 8 or 16.
        num_stages: depth of the pipeline that loads the tiles flowing past, 1 to 8.
        num_slices: 1, 2 or 4 parts of at least 16 queries, of which one is multiplied while
            another is exponentiated; of `forward` and `dq`, 1 elsewhere.
        one_loop: whether tiles at the edge of a mask are masked under a branch in the loop over
            all tiles; else, and where a query may not see the key at its own position, they have a
            loop of their own. Of `forward`, False elsewhere.

    Raises:
        ValueError: if a number is none of those.
        TypeError: if it is no int.
    """

    block_q: int
    block_kv: int
    num_warps: int = 4
    num_stages: int = 2
    num_slices: int = 1
    one_loop: bool = False

    def __post_init__(self):
        allowed = {
            "block_q": (16, 32, 64, 128, 256),
            "block_kv": (16, 32, 64, 128, 256),
            "num_warps": (1, 2, 4, 8, 16),
            "num_stages": tuple(range(1, 9)),
            "num_slices": (1, 2, 4),
        }
        for name, values in allowed.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(
                    f"`{name}` must be an int; got {type(value).__name__} {value!r}. Pass one of "
                    f"{values}."
                )
            if value not in values:
                raise ValueError(
                    f"`{name}` must be one of {values}; got {value}. Choose the nearest of them."
                )
        if not isinstance(self.one_loop, bool):
            raise TypeError(
                f"`one_loop` must be a bool; got {type(self.one_loop).__name__} {self.one_loop!r}. "
                "Pass True or False."
            )
        if self.slices_of(self.block_q) < self.num_slices:
            raise ValueError(
                f"`num_slices` must leave {MIN_ROWS} or more of `block_q` queries in each; got "
                f"{self.num_slices} of {self.block_q}. Use fewer."
            )

    def slices_of(self, block_q: int) -> int:
        """The slices of a tile that is shortened to `block_q` queries."""
        return min(self.num_slices, block_q // MIN_ROWS)


@dataclasses.dataclass(frozen=True)
class TileSizes:
    """Tiles for each kernel of `attention`; None takes the table's.

    Attributes:
        forward: the forward kernel; a query tile stays.
        decode: the forward kernel of calls with few queries: at most 16, or at most 4096 in all
            heads and examples and no more than keys. The rows that stay are the queries of all
            heads that share keys and values. If neither is given, it serves such calls with more
            than 512 keys; with `forward` alone that one does.
        dkv: the kernel for dk and dv together; a key/value tile stays.
        dk: the kernel for dk alone. Give `dk` and `dv` in place of `dkv` where both sums do not fit
            in registers.
        dv: the kernel for dv alone.
        dq: the kernel for dq; a query tile stays.

    Raises:
        ValueError: if `dkv` is mixed with `dk` or `dv`, or one of these two is missing.
        TypeError: if one is no `Tile`.
    """

    forward: Tile | None = None
    decode: Tile | None = None
    dkv: Tile | None = None
    dk: Tile | None = None
    dv: Tile | None = None
    dq: Tile | None = None

    def __post_init__(self):
        for name in KERNELS:
            value = getattr(self, name)
            if value is not None and not isinstance(value, Tile):
                raise TypeError(
                    f"`{name}` must be a pallas_flash.Tile or None; got {type(value).__name__} "
                    f"{value!r}. "
                    "Write Tile(block_q, block_kv, num_warps, num_stages)."
                )
            if value is not None and value.num_slices > 1 and name not in ("forward", "dq"):
                raise ValueError(
                    f"`{name}` must have `num_slices` 1; got {value}. Give slices to `forward` and "
                    "`dq` alone."
                )
            if value is not None and value.one_loop and name != "forward":
                raise ValueError(
                    f"`{name}` must have `one_loop` False; got {value}. Give it to `forward` alone."
                )
        split = (self.dk is not None, self.dv is not None)
        if any(split) and (self.dkv is not None or not all(split)):
            raise ValueError(
                f"`dk` and `dv` must be given together and without `dkv`; got dkv={self.dkv}, "
                f"dk={self.dk}, "
                f"dv={self.dv}. Give either `dkv` or both others."
            )

    def tile(self, kernel: str) -> Tile:
        """The tile of one of `KERNELS`, where there is one."""
        return getattr(self, kernel)

    def used(self, few: bool) -> "TileSizes":
        """These sizes without the forward kernel that does not serve many, or `few`, queries."""
        if not few:
            return dataclasses.replace(self, decode=None)
        return self if self.decode is None else dataclasses.replace(self, forward=None)

    def or_else(self, default: "TileSizes") -> "TileSizes":
        """These sizes, with what is None taken from `default`."""
        forward = default if self.forward is None and self.decode is None else self
        backward = default if self.dkv is None and self.dk is None else self
        return TileSizes(
            forward=forward.forward,
            decode=forward.decode,
            dkv=backward.dkv,
            dk=backward.dk,
            dv=backward.dv,
            dq=self.dq or default.dq,
        )


# Tiles by (padded head size, bytes of an element).
#
# Of Hopper: the fastest of those timed on an H200, full and causal, at 16384 tokens in 16 bits and
# at 4096 in float32 (docs/performance.md). With three stages two tiles are on their way while a
# third is worked on; with two, only what is needed late in a tile does not wait for memory.
_HOPPER = {
    (64, 2): TileSizes(forward=Tile(64, 64, 4, 3), dkv=Tile(64, 64, 4, 3), dq=Tile(128, 64, 4, 3)),
    (128, 2): TileSizes(
        forward=Tile(64, 64, 4, 3), dkv=Tile(64, 128, 8, 3), dq=Tile(128, 64, 8, 4)
    ),
    (256, 2): TileSizes(
        forward=Tile(128, 64, 8, 2),
        dk=Tile(32, 128, 8, 3),
        dv=Tile(64, 128, 8, 2),
        dq=Tile(128, 32, 8, 3),
    ),
    (64, 4): TileSizes(
        forward=Tile(128, 64, 8, 3), dkv=Tile(64, 128, 8, 2), dq=Tile(128, 32, 4, 3)
    ),
    (128, 4): TileSizes(
        forward=Tile(128, 32, 8, 3),
        dk=Tile(16, 128, 8, 3),
        dv=Tile(32, 128, 8, 2),
        dq=Tile(128, 32, 8, 3),
    ),
    (256, 4): TileSizes(
        # These spill; with half the rows that stay they would not, but have too few for the matrix
        # instructions.
        forward=Tile(128, 16, 8, 2),
        dk=Tile(16, 64, 4, 2),
        dv=Tile(16, 64, 4, 2),
        dq=Tile(64, 16, 4, 2),
    ),
}
# By counts, not timed. What is multiplied goes through shared and tensor memory there, which must
# have room for it.
_BLACKWELL = _HOPPER | {
    (256, 2): TileSizes(
        forward=Tile(128, 64, 8, 2),
        dk=Tile(32, 128, 8, 2),
        dv=Tile(32, 128, 8, 3),
        dq=Tile(128, 32, 8, 2),
    ),
    (256, 4): TileSizes(
        forward=Tile(64, 32, 4, 2),
        dk=Tile(16, 32, 4, 2),
        dv=Tile(16, 64, 4, 2),
        dq=Tile(32, 16, 4, 2),
    ),
}
# By counts, too.
_SYNCHRONOUS = _HOPPER | {
    (64, 2): TileSizes(forward=Tile(128, 64, 4, 2), dkv=Tile(64, 64, 4, 2), dq=Tile(64, 64, 4, 2)),
    (128, 2): TileSizes(forward=Tile(128, 64, 8, 2), dkv=Tile(32, 64, 4, 2), dq=Tile(64, 32, 4, 2)),
    (256, 2): TileSizes(
        forward=Tile(64, 32, 4, 2, one_loop=True),
        dk=Tile(32, 64, 8, 2),
        dv=Tile(32, 64, 8, 2),
        dq=Tile(64, 32, 8, 2),
    ),
    (64, 4): TileSizes(forward=Tile(128, 32, 8, 3), dkv=Tile(64, 32, 4, 2), dq=Tile(64, 32, 4, 3)),
}

# What was faster on an H200 than the table above, by (kind of call, padded head size, bytes of an
# element): from how many queries and keys on, from how many queries of all heads and examples on,
# and the tiles. The first entry that a call has enough for serves.
#
# _TALL has 128 rows for 4 warps, and two programs share a core. One of _IN_SLICES fills it, and
# wins where it runs long without an interruption. Both want many programs: a last round that does
# not fill the GPU costs more, the larger they are.
_TALL = Tile(128, 64, 4, 2, one_loop=True)
_IN_SLICES = Tile(256, 64, 8, 3, num_slices=2)
_BY_KIND = {
    ("full", 128, 2): [
        (2048, 2**17, {"forward": _IN_SLICES, "dq": _IN_SLICES}),
        (0, 2**17, {"forward": _TALL}),
    ],
    ("causal", 128, 2): [
        (8192, 2**18, {"forward": _IN_SLICES}),
        (0, 2**17, {"forward": _TALL}),
    ],
    ("scores", 128, 2): [(0, 0, {"dkv": Tile(64, 64, 4, 2)})],
    ("dropout", 128, 2): [(0, 0, {"dkv": Tile(32, 64, 4, 3)})],
}

# The same with bias or mask arrays, by (padded head size, bytes of an element) and then by bytes of
# those arrays for each pair of a query and a key; timed at 4096 tokens.
_WITH_PAIRS = {
    (64, 2): {
        1: TileSizes(forward=Tile(64, 64, 4, 3), dkv=Tile(32, 64, 4, 3), dq=Tile(128, 64, 4, 2)),
        2: TileSizes(forward=Tile(64, 64, 4, 3), dkv=Tile(32, 64, 4, 3), dq=Tile(128, 64, 4, 3)),
        4: TileSizes(forward=Tile(64, 32, 4, 3), dkv=Tile(64, 64, 4, 3), dq=Tile(128, 32, 4, 3)),
    },
    (128, 2): {
        1: TileSizes(forward=Tile(64, 64, 4, 3), dkv=Tile(64, 64, 4, 2), dq=Tile(64, 64, 4, 2)),
        2: TileSizes(forward=Tile(128, 64, 8, 3), dkv=Tile(32, 64, 4, 3), dq=Tile(128, 64, 8, 3)),
        4: TileSizes(forward=Tile(128, 64, 8, 3), dkv=Tile(32, 64, 4, 3), dq=Tile(64, 64, 4, 2)),
    },
}

# What was faster on an H200 where programs are few, by (padded head size, bytes of an element): up
# to how many queries, or keys, of all heads and examples, and the tiles. With 64 rows in place of
# 128 more programs run at once; where 64 stay anyway, longer steps win. Without a mask half as many
# queries and keys: all programs have the same work then, and more of them nothing to even out.
_FEW = {
    (64, 2): (2**15, {"forward": Tile(64, 128, 4, 2), "dq": Tile(64, 64, 4, 3)}),
    (128, 2): (
        2**14,
        {
            "forward": Tile(64, 128, 4, 2),
            "dkv": Tile(64, 64, 4, 3),
            "dq": Tile(64, 64, 4, 3),
        },
    ),
    (256, 2): (
        2**14,
        {
            "forward": Tile(64, 64, 4, 2),
            "dk": Tile(32, 64, 4, 3),
            "dv": Tile(64, 64, 4, 2),
            "dq": Tile(64, 64, 4, 2),
        },
    ),
    (64, 4): (2**14, dict.fromkeys(("forward", "dkv", "dq"), Tile(64, 64, 4, 2))),
    (128, 4): (
        2**14,
        {
            "forward": Tile(64, 64, 4, 2),
            "dk": Tile(32, 64, 4, 2),
            "dv": Tile(32, 64, 4, 3),
            "dq": Tile(64, 32, 4, 3),
        },
    ),
}

# Where keys stay, so many of all heads and examples make programs enough (half as many without a
# mask). With fewer, the query heads that share them are shared out. Timed on an H200.
_ENOUGH_KEYS = 2**15

# Bytes of a key and a value tile of "decode". With three stages one pair is on its way while
# another is used, and three programs of up to 16 rows share a core of the H200 (counted). Half or
# twice the bytes, or other stages, were slower, but for two stages in one shape, by 4 % (timed).
_DECODE_STAGE = 32 * 1024

# Bytes of shared memory that one program may have, by compute capability (CUDA C++ Programming
# Guide, table "Technical Specifications per Compute Capability").
_SHARED_MEMORY = {
    (8, 0): 163 * 1024,
    (8, 6): 99 * 1024,
    (8, 7): 163 * 1024,
    (8, 9): 99 * 1024,
    (9, 0): 227 * 1024,
    (10, 0): 227 * 1024,
    (10, 3): 227 * 1024,
    (11, 0): 227 * 1024,
    (12, 0): 99 * 1024,
    (12, 1): 99 * 1024,
}


def choose(
    asked: TileSizes | None,
    *,
    q_len: int,
    kv_len: int,
    head_dim: int,
    value_dim: int,
    itemsize: int,
    capability: tuple[int, int] | None,
    pair_bytes: int,
    kind: str,
    masked: bool,
    rows: int,
    kv_rows: int,
    groups: int,
) -> TileSizes:
    """The tiles for a problem: those asked for, the rest from the table, fitted to the GPU.

    Args:
        asked: what the user wants; used as it is.
        q_len: T.
        kv_len: S.
        head_dim: H.
        value_dim: V.
        itemsize: bytes of an element.
        capability: compute capability of the GPU; None (unknown, or the interpreter) means that of
            the H100 and H200.
        pair_bytes: bytes of bias and mask arrays for each pair of a query and a key. They wait in
            shared memory too; tiles that were not timed with them have two stages at most then, so
            that as many programs fit on a core as without.
        kind: `Problem.kind`.
        masked: whether there is a mask.
        rows: queries of all heads and examples.
        kv_rows: keys of all heads and examples.
        groups: query heads that share a key/value head.

    Raises:
        ValueError: if tiles that were asked for do not fit in the shared memory of the GPU.
    """
    width = max(64, 1 << (max(head_dim, value_dim) - 1).bit_length())
    limit = shared_memory_limit(capability)
    few = few_queries(q_len, kv_len, rows)
    hopper = capability in (None, (9, 0))
    blackwell = not hopper and (10, 0) <= capability < (12, 0)
    default = (_HOPPER if hopper else _BLACKWELL if blackwell else _SYNCHRONOUS)[width, itemsize]
    with_pairs = _WITH_PAIRS.get((width, itemsize)) if hopper and pair_bytes else None
    if with_pairs:
        default = with_pairs[max(size for size in with_pairs if size <= pair_bytes)]
    elif hopper:
        limit_rows, tiles = _FEW.get((width, itemsize), (0, {}))
        spread = kv_rows * shares_of_heads(groups, kv_rows, masked)
        for name, tile in tiles.items():
            if (spread if name in KEYS_STAY else rows) * (2 - masked) <= limit_rows:
                default = dataclasses.replace(default, **{name: tile})
        for length, many, tiles in _BY_KIND.get((kind, width, itemsize), ()):
            if min(q_len, kv_len) >= length and rows >= many:
                default = dataclasses.replace(default, **tiles)
                break
    if kv_len > MANY_KEYS:
        # With more rows one program would fill a core at 256, and spill in float32.
        stay = 64 if width < 256 else 32
        decode = Tile(stay, _DECODE_STAGE // (2 * width * itemsize), 4, 3)
        default = dataclasses.replace(default, decode=decode).used(few)

    def shared(name, tile):
        pairs = tile.num_stages * tile.block_q * tile.block_kv * pair_bytes
        return _shared_bytes(name, tile, width, itemsize) + pairs

    for name in KERNELS:
        tile = getattr(default, name)
        if tile is None:
            continue
        if pair_bytes and (name == "decode" or not with_pairs):
            tile = dataclasses.replace(tile, num_stages=min(tile.num_stages, 2))
        if name == "decode" and shared(name, tile) > limit:
            # It needs rows, for keys to be read once, more than it needs another pair on its way.
            tile = dataclasses.replace(tile, num_stages=2)
        while shared(name, tile) > limit and (smaller := _smaller(name, tile)) != tile:
            tile = smaller
        default = dataclasses.replace(default, **{name: tile})
    if asked is None:
        return default
    asked = asked.used(few)
    for name in KERNELS:
        tile = getattr(asked, name)
        if tile is not None and (need := shared(name, tile)) > limit:
            raise ValueError(
                f"`tile_sizes.{name}` must fit in the GPU's {limit // 1024} KiB of shared memory; "
                f"got {tile}, "
                f"which needs about {need // 1024} KiB at head size {max(head_dim, value_dim)}. "
                f"Use smaller blocks or "
                "fewer stages."
            )
    return asked.or_else(default)


def few_queries(q_len: int, kv_len: int, rows: int) -> bool:
    """Whether "decode" may serve, for so many queries and keys, and queries of all heads."""
    return q_len <= FEW_QUERIES or rows <= min(kv_len, FEW_ROWS)


def shares_of_heads(groups: int, kv_rows: int, masked: bool) -> int:
    """Among how many programs "dkv" shares out the `groups` heads of a key: a divisor of `groups`.

    `kv_rows` are the keys of all heads and examples; `masked` is whether there is a mask, whose
    tiles differ in work, so that more programs are better.
    """
    enough = _ENOUGH_KEYS if masked else _ENOUGH_KEYS / 2
    divisors = [n for n in range(1, groups + 1) if groups % n == 0]
    # The nearest, for sums of many shares take time and memory. (There may be no keys.)
    return min(divisors, key=lambda n: abs(math.log2(n * max(1, kv_rows) / enough)))


def shared_memory_limit(capability: tuple[int, int] | None) -> int:
    """Bytes of shared memory one program may have; for an unlisted GPU the smallest listed."""
    if capability is None:
        return _SHARED_MEMORY[9, 0]
    return _SHARED_MEMORY.get(capability, min(_SHARED_MEMORY.values()))


def _shared_bytes(kernel: str, tile: Tile, width: int, itemsize: int) -> int:
    """What a kernel keeps there at least: tiles that stay, and a pair that flows for each stage."""
    stay, flow = tile.block_q, tile.block_kv
    if kernel in KEYS_STAY:
        stay, flow = flow, stay
    kept = {"forward": 1, "decode": 1, "dkv": 2, "dk": 2, "dv": 1, "dq": 2}[kernel]
    return (kept * stay + 2 * tile.num_stages * flow) * width * itemsize


def _smaller(kernel: str, tile: Tile) -> Tile:
    """The tile with its larger block halved, and 4 warps once 64 rows or fewer stay.

    With the smallest blocks one stage is left.
    """
    if tile.block_q == tile.block_kv == 16:
        return dataclasses.replace(tile, num_stages=1)
    if tile.block_q >= tile.block_kv:
        tile = dataclasses.replace(tile, block_q=max(16, tile.block_q // 2))
    else:
        tile = dataclasses.replace(tile, block_kv=max(16, tile.block_kv // 2))
    stay = tile.block_kv if kernel in KEYS_STAY else tile.block_q
    return dataclasses.replace(tile, num_warps=4) if stay <= 64 else tile
