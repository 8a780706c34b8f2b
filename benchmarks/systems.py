"""Write the table of systems into docs/systems.md, from the registry: `make tables`."""

import re
from pathlib import Path

from lineartime.models.catalogue import systems_table

PAGE = Path(__file__).parents[1] / "docs" / "systems.md"


def main() -> None:
    table = f"\\1\n\n{systems_table()}\n<!-- end -->"
    text, found = re.subn(r"(<!-- systems: .*? -->).*?<!-- end -->", table, PAGE.read_text(), count=1, flags=re.DOTALL)
    if not found:
        raise SystemExit(f"{PAGE} has no place for the table of systems.")
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
