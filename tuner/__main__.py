"""`python -m tuner`."""

import sys

try:
    from tuner.cli import main

    code = main()
except KeyboardInterrupt:  # while modules are still being imported
    code = 130
sys.exit(code)
