"""Models of equal size, and chunks of another size after training."""

from dataclasses import replace

import torch

import lineartime
from lineartime.experiments.catalogue import SCALES, Arm, Setting
from lineartime.experiments.plan import model_at, parameters_of, wide_enough
from lineartime.experiments.worker import with_chunk_size
from lineartime.models import CausalLM
from lineartime.models.systems import SYSTEMS


def test_every_causal_system_has_a_width_near_the_parameters_of_a_narrow_model() -> None:
    size, setting = SCALES["cpu"].sizes["memory"], Setting("books", 512)
    target = parameters_of(model_at(Arm("flash", "flash"), size, "clm", setting, 513, None))
    causal = [name for name, system in SYSTEMS.items() if all(mixer.why_not_causal is None for mixer in system.mixers)]
    for name in causal:
        model = model_at(Arm(name, name), size, "clm", setting, 513, target)
        assert 0.8 < parameters_of(model) / target < 1.2, name


def test_models_are_as_wide_as_the_pairs_they_recall() -> None:
    size = SCALES["cpu"].sizes["main"]
    narrow = replace(size, d_model=64, d_qk=64)
    assert wide_enough(narrow, 64) == narrow
    assert wide_enough(narrow, 65) == wide_enough(narrow, 128) == replace(narrow, d_model=128, d_qk=128)
    assert wide_enough(size, 200) == replace(size, d_qk=256)


def test_other_chunks_keep_what_was_learnt_of_their_distances() -> None:
    model = lineartime.build("flash-tiny", chunk_size=16, d_model=16, n_blocks=1, d_qk=8)
    assert isinstance(model, CausalLM)
    ids = torch.arange(40)[None]
    before = model.eval()(ids)
    for size in (8, 16, 32):
        other = with_chunk_size(model, size)
        assert other is not None
        torch.testing.assert_close(other(ids)[:, :8], before[:, :8])  # the same distances have the same biases
        if size == 16:
            torch.testing.assert_close(other(ids), before)
        else:
            assert not torch.equal(other(ids)[:, 20:], before[:, 20:])
    [table] = [weight for name, weight in other.state_dict().items() if name.endswith("bias.table")]
    assert table[:16].eq(0).all()  # of chunks of 32: distances that training did not see
    assert with_chunk_size(model, 1024) is None  # whose bias has another form
