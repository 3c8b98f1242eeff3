"""`python -m tuner`."""

import sys

try:
    from tuner.heap import keep_compact

    keep_compact()
    from tuner.cli import main

    code = main()
except KeyboardInterrupt:  # while modules are still being imported
    code = 130
sys.exit(code)
