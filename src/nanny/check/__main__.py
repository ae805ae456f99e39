"""`python -m nanny.check PATH...` is `nanny check PATH...`."""

import sys

from nanny.cli import main

sys.exit(main(["check", *sys.argv[1:]]))
