"""The MoE layer: full forward, pruned and compacted backward, and the controller that owns its state.

Data walks route -> plan -> dispatch -> experts -> combine, and back score -> select -> reroute -> pack -> exchange ->
experts' backward -> return.
"""

from lrmoe.layer.buffers import release_scratch
from lrmoe.layer.controller import StepClock
from lrmoe.layer.moe import MoELayer
from lrmoe.layer.padding import padding

__all__ = ["MoELayer", "StepClock", "padding", "release_scratch"]
