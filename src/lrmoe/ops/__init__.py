"""Data plane on one device: grouped matrix products, gated activation with row norms, moving rows.

Shape letters: N rows (pairs), E experts, H hidden, I expert width, T tokens, K experts per token.
"""

from lrmoe.ops.activation import ACTIVATIONS, gated_activation, gated_activation_backward
from lrmoe.ops.fused import fuses, indexes
from lrmoe.ops.grouped import grouped_mm, grouped_mm_input, grouped_mm_weight, reads_by_index
from lrmoe.ops.host import Reading, upload
from lrmoe.ops.pages import empty
from lrmoe.ops.rows import abs_sums, combine, gather_rows, place_rows, row_norms
from lrmoe.ops.workspace import Workspace

__all__ = [
    "ACTIVATIONS",
    "Reading",
    "Workspace",
    "abs_sums",
    "combine",
    "empty",
    "fuses",
    "gated_activation",
    "gated_activation_backward",
    "gather_rows",
    "grouped_mm",
    "grouped_mm_input",
    "grouped_mm_weight",
    "indexes",
    "place_rows",
    "reads_by_index",
    "row_norms",
    "upload",
]
