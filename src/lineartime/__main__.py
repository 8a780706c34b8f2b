"""The command `lineartime`, also as `python -m lineartime`."""

import sys


def main() -> int:
    """Run the command line and return its exit status; an interrupt ends quietly even while PyTorch is being imported."""
    try:
        from lineartime.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
