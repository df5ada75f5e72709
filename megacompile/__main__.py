"""`python -m megacompile`."""

import contextlib
import os
import sys

from megacompile.cli import main
from megacompile.garbage import OF_A_PLAN, old_objects_left_out

plans = sys.argv[1:2] == ["plan"]
with old_objects_left_out(OF_A_PLAN) if plans else contextlib.nullcontext():
    code = main()
    if plans:  # skip torch's shutdown, which takes seconds
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
raise SystemExit(code)
