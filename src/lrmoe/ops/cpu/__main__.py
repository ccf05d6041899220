"""Build the CPU passes anew: `python -m lrmoe.ops.cpu [compiler with arguments]`."""

import sys

from lrmoe.ops.cpu.build import main

sys.exit(main(" ".join(sys.argv[1:])))
