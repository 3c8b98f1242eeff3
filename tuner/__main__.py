"""`python -m tuner`."""

import sys

try:
    from tuner.cli import main
    from tuner.schedule import process_began

    code = main(began=process_began())
except KeyboardInterrupt:  # while modules are still being imported
    code = 130
sys.exit(code)
