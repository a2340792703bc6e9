"""`python -m scheduler` is the command line."""

import sys

from scheduler.cli import main

sys.exit(main())
