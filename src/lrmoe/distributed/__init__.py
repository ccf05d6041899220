"""Exchange between the ranks of an expert-parallel group. The same code on gloo and NCCL."""

# Functions of this module take the default group of the moment it is imported as their default argument. Models of
# transformers import it: after init_process_group that keeps the group and gloo's threads beyond destroy_process_group,
# and a thread that frees a tensor while the interpreter ends aborts the process.
import torch.distributed.nn  # noqa: F401  # imported for the moment it is imported at

from lrmoe.distributed.comm import Comm
from lrmoe.distributed.header import Header, HeaderTable
from lrmoe.distributed.replicas import fetch_replicas, return_gradients

__all__ = ["Comm", "Header", "HeaderTable", "fetch_replicas", "return_gradients"]
