"""These tests run kernels in triton's interpreter, on CPU tensors; `TRITON_INTERPRET=0` runs them on a GPU.

Triton looks when it is first imported. This file is read while tests are collected, and nothing imports triton before.
"""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
