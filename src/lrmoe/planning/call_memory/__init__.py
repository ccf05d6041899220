"""Memory of one layer call, moment by moment: forward.py and backward.py mirror those of the layer."""

from lrmoe.planning.call_memory.sizes import CallSizes
from lrmoe.planning.call_memory.walk import CallMemory, CallWalk

__all__ = ["CallMemory", "CallSizes", "CallWalk"]
