"""`python -m tests.frames`. What its processes run has to be in another file."""

import sys

from tests.frames.command import main

if __name__ == "__main__":
    sys.exit(main())
