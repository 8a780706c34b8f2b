"""The option of commands that read a run: which of its checkpoints."""

from typing import Annotated, cast

import tyro

from lineartime.checkpoint import Which

WhichOption = Annotated[str | None, tyro.conf.arg(metavar="best|last|STEP")]
"""A text, so that a wrong value is answered by `find_checkpoint`, in a sentence."""


def which_checkpoint(given: str | None) -> Which | None:
    """The checkpoint that an option names."""
    is_step = given is not None and given.isdecimal() and len(given) < 20  # Python reads no number of thousands of digits
    return int(given) if given is not None and is_step else cast("Which | None", given)
