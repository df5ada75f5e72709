"""`python -m megacompile`."""

import os
import sys

from megacompile.cli import main, plan

code = main()
if sys.argv[1] == plan.NAME:  # torch takes seconds to take itself apart, and nothing is left to do
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
raise SystemExit(code)
