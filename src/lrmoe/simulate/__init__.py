"""Load patterns, and how every system would plan them: NumPy and integers, no torch, no process groups."""
