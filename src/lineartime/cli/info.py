"""`lineartime info`: what would run on this machine, and why."""

import json
from dataclasses import dataclass

from lineartime.screen import new_table, output_console


@dataclass(frozen=True)
class InfoOptions:
    """The options of `lineartime info`."""

    json: bool = False
    """Print the same as one line of JSON."""


def run(options: InfoOptions) -> None:
    """Print what `explain_machine` finds."""
    from lineartime.info import explain_machine

    facts = list(explain_machine())
    if options.json:
        print(json.dumps({fact.name: {"value": fact.value, "why": fact.why} for fact in facts}))
        return
    headers = ("", "here", "why")
    table = new_table(headers, left=headers, folded=("here", "why"))
    for fact in facts:
        table.add_row(fact.name, fact.value, fact.why)
    # Without markup, because [plot] is the name of an extra. Cells are rendered with the console's settings.
    output_console(markup=False).print(table)
