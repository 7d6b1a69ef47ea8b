"""`python -m refattn` is the command `refattn`."""

import sys

from refattn.cli import main

sys.exit(main())
