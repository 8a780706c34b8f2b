"""A model saved outside a run: everything that reads a checkpoint reads it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lineartime
from lineartime.cli import main
from lineartime.data import ByteTokenizer
from lineartime.errors import ArgumentError
from lineartime.layers import FLASH

TOKENIZER = ByteTokenizer()
Tiny = Callable[..., Any]


def test_saved_model_is_the_same_when_loaded(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny(dropout=0.1)  # in training mode
    folder = lineartime.save(model, TOKENIZER, str(tmp_path / "new" / "model"))
    assert folder == tmp_path / "new" / "model"
    loaded = lineartime.load(str(folder))
    assert loaded.config == model.config
    assert not loaded.training
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert lineartime.load_tokenizer(folder).to_json() == TOKENIZER.to_json()
    assert [path.name for path in folder.parent.iterdir()] == ["model"]  # nothing half written


def test_commands_read_a_saved_model(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(lineartime.save(tiny(), TOKENIZER, tmp_path / "model"))
    assert main(["generate", folder, "--prompt", "a", "--max-tokens", "3"]) == 0
    (tmp_path / "text.txt").write_text("what a saved model is measured on\n" * 20)
    measured = ["--data", str(tmp_path / "text.txt"), "--context-length", "16", "--cache", str(tmp_path / "cache")]
    assert main(["eval", folder, *measured]) == 0
    assert "nats per token" in capsys.readouterr().out
    masked = lineartime.build("flash-tiny", "mlm", d_model=16, n_blocks=1, d_qk=8)
    assert main(["fill", str(lineartime.save(masked, TOKENIZER, tmp_path / "masked")), "--text", "[MASK]"]) == 0


def test_model_that_could_not_be_read_back_is_not_saved(tiny: Tiny, tmp_path: Path) -> None:
    infinite, beyond, extended = tiny(), tiny().double(), tiny()
    with torch.no_grad():
        infinite.backbone.embedding.weight[0, 0] = torch.nan
        beyond.backbone.embedding.weight[0, 0] = 1e300  # infinite in float32
    extended.backbone.register_parameter("more", torch.nn.Parameter(torch.zeros(1)))
    wrong: list[tuple[Any, Any, str]] = [
        (infinite, TOKENIZER, "model has numbers in backbone.embedding.weight that are not finite"),
        (beyond, TOKENIZER, "model has numbers in backbone.embedding.weight that are not finite"),
        (tiny(vocab_size=300), TOKENIZER, "tokenizer has 258 tokens, but the model's vocabulary has 300"),
        (extended, TOKENIZER, "model could not be loaded again: model.safetensors has the tensor 'backbone.more'"),
        (tiny().to("meta"), TOKENIZER, "model has backbone.embedding.weight on the meta device, where it has no values"),
        (tiny().to(torch.float8_e4m3fn), TOKENIZER, "model could not be loaded again: .* is of type F8_E4M3, but must be"),
        (torch.nn.Linear(2, 2), TOKENIZER, "model is of type Linear, but must be a language model"),
        (tiny(), "bytes", "tokenizer is of type str"),
    ]
    for model, tokenizer, message in wrong:
        with pytest.raises(ArgumentError, match=message):
            lineartime.save(model, tokenizer, tmp_path / "model")
    assert not list(tmp_path.iterdir())


class Ungated(FLASH):
    def apply_gate(self, gate: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        return attended


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda block: setattr(block.mixer, "normalization", "paper"),
            "model has normalization = 'paper' in backbone.blocks.0.mixer, but 'count' in its config, so another model would "
            "be loaded: build it with normalization='paper'",
        ),
        (
            lambda block: setattr(block.mixer.norm, "eps", 1e-3),
            "model has eps = 0.001 in backbone.blocks.0.mixer.norm, but 1e-05",
        ),
        (
            lambda block: setattr(block, "mixer", Ungated(16, d_qk=8, chunk_size=8, causal=True)),
            r"model has a Ungated as backbone.blocks.0.mixer, but a FLASH in its config.*: save its state_dict\(\) instead",
        ),
    ],
)
def test_model_that_would_be_loaded_as_another_function_is_not_saved(
    tiny: Tiny, change: Callable[[Any], None], message: str, tmp_path: Path
) -> None:
    model = tiny()
    change(model.backbone.blocks[0])
    with pytest.raises(ArgumentError, match=f"^{message}"):
        lineartime.save(model, TOKENIZER, tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_model_is_loaded_in_float32_whatever_the_default_dtype_is(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny()
    lineartime.save(model, TOKENIZER, tmp_path / "model")
    torch.set_default_dtype(torch.bfloat16)
    try:
        loaded = lineartime.load(tmp_path / "model")
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_model_whose_blocks_share_weights_is_saved_with_a_copy_for_each(tmp_path: Path) -> None:
    model = lineartime.build("flash-tiny", d_model=16, n_blocks=2, d_qk=8, chunk_size=8)
    first, second = model.backbone.blocks
    second.mixer = first.mixer
    loaded = lineartime.load(lineartime.save(model, TOKENIZER, tmp_path / "model"))
    assert all(torch.equal(loaded.state_dict()[name], weight) for name, weight in model.state_dict().items())
