"""`python -m nanny.cli COMMAND ...` is `nanny COMMAND ...`."""

import sys

from . import main

sys.exit(main())
