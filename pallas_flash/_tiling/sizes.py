"""Tile sizes: how they are written down and checked, whichever backend they are for.

A kernel keeps a tile of one side in registers while tiles of the other side pass through shared
memory in a pipeline of `num_stages`.
"""

import dataclasses

# The kernels that have a tile, by the names of the fields of `TileSizes`.
KERNELS = ("forward", "decode", "dkv", "dk", "dv", "dq")
FORWARD = ("forward", "decode")
KEYS_STAY = ("dkv", "dk", "dv")

# Matrix units take no fewer rows and columns.
MIN_ROWS = 16

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


def sizes_for(kernel: str, tile: Tile) -> TileSizes:
    """A tile for one kernel; dk and dv, which go together, get the smallest for the other."""
    names = ("dk", "dv") if kernel in ("dk", "dv") else (kernel,)
    return TileSizes(**(dict.fromkeys(names, Tile(16, 16, 4, 1)) | {kernel: tile}))


def few_queries(q_len: int, kv_len: int, rows: int) -> bool:
    """Whether "decode" may serve, for so many queries and keys, and queries of all heads."""
    return q_len <= FEW_QUERIES or rows <= min(kv_len, FEW_ROWS)


def power_of_2(n: int) -> int:
    """The smallest that is at least `n`."""
    return 1 << max(0, n - 1).bit_length()
