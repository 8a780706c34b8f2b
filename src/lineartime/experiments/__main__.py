"""`python -m lineartime.experiments NAME`: the command `lineartime reproduce`."""

import sys

from lineartime.__main__ import main

if __name__ == "__main__":
    sys.argv.insert(1, "reproduce")
    sys.exit(main())
