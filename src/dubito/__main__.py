"""`python -m dubito`."""

import sys

from .cli import main

sys.exit(main())
