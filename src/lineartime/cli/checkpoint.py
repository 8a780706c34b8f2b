"""The option of commands that read a run: which of its checkpoints."""

from typing import Annotated, cast

import tyro

from lineartime.checkpoint import Which

WhichOption = Annotated[str | None, tyro.conf.arg(metavar="best|last|STEP")]
"""A text, so that a wrong value is answered by `find_checkpoint`, in a sentence."""


def which_checkpoint(given: str | None) -> Which | None:
    """The checkpoint that an option names."""
    return int(given) if given is not None and given.isdecimal() else cast("Which | None", given)
