"""What tiles are chosen by."""

import dataclasses

from pallas_flash._problem import Problem
from pallas_flash._tiling import sizes


@dataclasses.dataclass(frozen=True)
class Workload:
    """A call and its GPU, as far as they matter for tiles.

    Attributes:
        q_len: T.
        kv_len: S.
        head_dim: H.
        value_dim: V.
        itemsize: bytes of an element.
        capability: compute capability of the GPU; None (unknown, or the interpreter) means that of
            the H100 and H200.
        pair_bytes: bytes of bias and mask arrays for each pair of a query and a key, which wait in
            shared memory too.
        kind: `Problem.kind`.
        masked: whether there is a mask.
        rows: queries of all heads and examples.
        kv_rows: keys of all heads and examples.
        groups: query heads that share a key/value head.
    """

    q_len: int
    kv_len: int
    head_dim: int
    value_dim: int
    itemsize: int
    capability: tuple[int, int] | None
    pair_bytes: int
    kind: str
    masked: bool
    rows: int
    kv_rows: int
    groups: int

    @property
    def few_queries(self) -> bool:
        """Whether "decode" may serve."""
        return sizes.few_queries(self.q_len, self.kv_len, self.rows)


def of_problem(p: Problem, capability: tuple[int, int] | None) -> Workload:
    """The workload that a problem is for a GPU."""
    return Workload(
        q_len=p.q_len,
        kv_len=p.kv_len,
        head_dim=p.head_dim,
        value_dim=p.value_dim,
        itemsize=p.dtype.itemsize,
        capability=capability,
        pair_bytes=p.pair_bytes,
        kind=p.kind,
        masked=bool(p.mask),
        rows=p.rows,
        kv_rows=p.kv_rows,
        groups=p.groups,
    )
