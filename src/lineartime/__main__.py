"""`python -m lineartime` is the command `lineartime`."""

import sys

from lineartime.cli import main

sys.exit(main())
