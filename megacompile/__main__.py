"""`python -m megacompile`."""

from megacompile.cli import main

raise SystemExit(main())
