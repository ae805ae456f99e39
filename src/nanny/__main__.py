"""`python -m nanny COMMAND ...` is `nanny COMMAND ...`."""

import sys

from .cli import main

sys.exit(main())
