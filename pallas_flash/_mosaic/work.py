"""Names of `block_ranges` and `scheduler` for the kernels of the backward."""

from pallas_flash._mosaic.block_ranges import block_table as table
from pallas_flash._mosaic.block_ranges import of_instances as of_instances
from pallas_flash._mosaic.scheduler import NUM_SMS as CORES
from pallas_flash._mosaic.scheduler import QUERY_ROWS as ROWS
from pallas_flash._mosaic.scheduler import QueryTiles


class Parts(QueryTiles):
    """`QueryTiles` by its old names."""

    zigzag = property(lambda self: self.folded)
    items = property(lambda self: self.per_head)


__all__ = ["CORES", "ROWS", "Parts", "of_instances", "table"]
