"""Write the table of systems into the README, from the registry: `make tables`."""

import re
from pathlib import Path

from lineartime.models.catalogue import systems_table

README = Path(__file__).parents[1] / "README.md"


def main() -> None:
    table = f"\\1\n\n{systems_table()}\n<!-- end -->"
    text, found = re.subn(r"(<!-- systems: .*? -->).*?<!-- end -->", table, README.read_text(), count=1, flags=re.DOTALL)
    if not found:
        raise SystemExit(f"{README} has no place for the table of systems.")
    README.write_text(text)


if __name__ == "__main__":
    main()
