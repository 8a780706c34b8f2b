"""Every system goes through training, checkpoint and back."""

from collections.abc import Callable

import pytest
import torch

import lineartime
from lineartime.checkpoint import last_checkpoint
from lineartime.models import presets
from lineartime.models.systems import SYSTEMS
from lineartime.training.config import TrainConfig
from lineartime.training.loop import prepare

# Those with a state of their own beside parameters, or with other ways through training, on every run.
USUAL = ("flash", "flash-next", "gau-softmax", "transformer++", "reformer", "bigbird")


@pytest.mark.parametrize(
    "system", [name if name in USUAL else pytest.param(name, marks=pytest.mark.nightly) for name in SYSTEMS]
)
def test_trained_system_is_read_back_as_it_was(system: str, config: Callable[..., TrainConfig]) -> None:
    name = f"{system}-tiny"
    task = "clm" if name in presets("clm") else "mlm"
    trainer = prepare(config(preset=name, task=task, override=("d_model=16", "n_blocks=1"), steps=1, track=()))
    run = trainer.run().run
    ids = torch.arange(40)[None]
    with torch.no_grad():
        logits = trainer.model.eval()(ids)
        assert logits.isfinite().all()
        # A hash that is drawn at random, and is no parameter, has to come back as well.
        torch.testing.assert_close(lineartime.load(last_checkpoint(run))(ids), logits)
