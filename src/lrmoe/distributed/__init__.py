"""Exchange between the ranks of an expert-parallel group. The same code on gloo and NCCL."""

from lrmoe.distributed.comm import Comm
from lrmoe.distributed.header import Header, HeaderTable

__all__ = ["Comm", "Header", "HeaderTable"]
