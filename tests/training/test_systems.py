"""Every system goes through training, checkpoint and back."""

from pathlib import Path

import pytest
import torch

import lineartime
from lineartime.checkpoint import last_checkpoint
from lineartime.models import presets
from lineartime.models.systems import SYSTEMS
from lineartime.training.config import TrainConfig
from lineartime.training.loop import prepare


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_trained_system_is_read_back_as_it_was(system: str, text: Path, tmp_path: Path) -> None:
    name = f"{system}-tiny"
    config = TrainConfig(
        preset=name,
        override=("d_model=16", "n_blocks=1"),
        task="clm" if name in presets("clm") else "mlm",
        data=text,
        context_length=24,
        batch_size=2,
        steps=1,
        eval_windows=2,
        precision="fp32",
        compile="off",
        track=(),
        cache=tmp_path / "cache",
        out=tmp_path / "run",
    )
    trainer = prepare(config)
    trainer.run()
    ids = torch.arange(40)[None]
    with torch.no_grad():
        logits = trainer.model.eval()(ids)
        assert logits.isfinite().all()
        # A hash that is drawn at random, and is no parameter, has to come back as well.
        torch.testing.assert_close(lineartime.load(last_checkpoint(tmp_path / "run"))(ids), logits)
