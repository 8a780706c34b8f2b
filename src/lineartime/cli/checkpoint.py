"""The option of commands that read a run: which of its checkpoints."""

from typing import Annotated, cast

import tyro

from lineartime.checkpoint import CheckpointChoice

CheckpointOption = Annotated[str | None, tyro.conf.arg(metavar="best|last|STEP")]
"""A text, so that a wrong value is answered by `find_checkpoint`, in a sentence."""


def checkpoint_choice(given: str | None) -> CheckpointChoice | None:
    """The checkpoint that an option names."""
    is_step = given is not None and given.isdecimal() and len(given) < 20  # Python reads no number of thousands of digits
    return int(given) if given is not None and is_step else cast("CheckpointChoice | None", given)
