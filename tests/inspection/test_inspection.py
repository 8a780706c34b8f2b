"""What `inspect` finds is what the model does, and what the page shows is the text, whatever the text is."""

import dataclasses
from base64 import b64encode
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.layers.test_contract import Average
from torch import Tensor

import lineartime
from lineartime.choices import Task
from lineartime.data import ByteTokenizer
from lineartime.errors import ArgumentError
from lineartime.inspection import inspect, write_inspection
from lineartime.inspection.page import page
from lineartime.models.language_model import LanguageModel
from lineartime.models.presets import resolve
from lineartime.models.systems import SYSTEMS

TEXT = "for each line in text:\n    print(line)\n"
HOSTILE = "<script>alert('1')</script><img src=x onerror=y>&lt;\u202e\u2066\x00\x1b[31m\ud800\"'</div></body>שלום"
BYTES = ByteTokenizer()


def build(system: str, task: Task = "clm") -> LanguageModel:
    torch.manual_seed(0)
    small = {"d_model": 16, "n_blocks": 2, "d_qk": 8, "chunk_size": 8, "n_heads": 2}
    options = resolve(f"{system}-tiny", task).mixer.options
    known = {name: value for name, value in small.items() if name in options or name in ("d_model", "n_blocks")}
    model = lineartime.build(f"{system}-tiny", task=task, **known).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


class Shown(HTMLParser):
    """The text that a browser shows of a part of a page, and all its tags."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._depth = 0
        self.feed(source)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        self._depth += tag == "div" and dict(attributes).get("class") == "text"

    def handle_endtag(self, tag: str) -> None:
        self._depth -= tag == "div" and self._depth > 0

    def handle_data(self, data: str) -> None:
        self.text += data if self._depth else ""


def test_the_losses_are_those_of_the_model() -> None:
    model = build("flash")
    seen = inspect(model, BYTES, TEXT)
    ids = torch.tensor([[BYTES.end_of_document, *BYTES.encode(TEXT)]])
    with torch.no_grad():
        assert seen.loss == pytest.approx(float(model.loss(ids[:, :-1], ids[:, 1:])), abs=1e-5)
    assert "".join(piece.text for piece in seen.pieces) == TEXT
    assert seen.left_out == 0


def test_contributions_and_states_are_what_the_layers_compute() -> None:
    model = build("flash")
    seen = inspect(model, BYTES, TEXT)
    ids = torch.tensor([[BYTES.end_of_document, *BYTES.encode(TEXT)]])[:, :-1]
    inputs: list[Tensor] = []
    backbone = model.backbone
    with torch.no_grad():
        backbone.read(ids, inputs=inputs)
        for block, x, layer in zip(backbone.blocks, inputs, seen.layers, strict=True):
            mixer: Any = block.mixer
            rotations = mixer.describe(x.shape, device=x.device).rotations
            gate, v, maps = mixer.split(mixer.to_gate_value_base(mixer.norm(x)), rotations)
            near, across = (layer.weights[part] @ v[0] for part in ("local", "global"))
            out = mixer.to_output(gate[0] * (near + across))
            torch.testing.assert_close(x[0] + out, mixer(x)[0], atol=1e-6, rtol=0)
            weight = mixer.to_output.weight
            for part, attended in (("local", near), ("global", across)):
                torch.testing.assert_close(layer.added[part], ((gate[0] * attended) @ weight.T).norm(dim=-1))
            share = layer.global_share
            assert share is not None
            assert not share[:8].any()  # the first chunk reads no earlier one
            assert 0 < float(share[8:].mean()) < 1
            k_lin = maps[3][0]
            for read, norm in layer.states.items():
                whole = read // 8 * 8
                assert norm == pytest.approx(float((k_lin[:whole].T @ v[0, :whole]).norm()), abs=1e-5)
            assert list(layer.states)[-1] == len(x[0])


@pytest.mark.parametrize("system", ["flash-quad", "transformer++", "performer", "linformer", "longformer", "flash-local"])
def test_a_system_is_shown_or_says_what_it_does_not_have(system: str) -> None:
    task: Task = "mlm" if SYSTEMS[system].mixer.why_not_causal else "clm"
    seen = inspect(build(system, task), BYTES, TEXT)
    for layer in seen.layers:
        sentences = " ".join(layer.missing)
        assert layer.weights or "cannot show attention weights: " in sentences
        assert layer.global_share is not None or "not divided" in sentences or not layer.weights
        assert layer.states or "no state grows" in sentences or "no global state" in sentences
        assert all(sentence.endswith(".") for sentence in layer.missing)
        assert all(weights.shape == (len(TEXT), len(TEXT)) for weights in layer.weights.values())
    assert page(seen, system, {}).count("<h2>") == 2


def test_a_mixer_that_cannot_be_opened_is_not_said_to_have_no_state() -> None:
    model = build("flash")
    next(iter(model.backbone.blocks)).mixer = Average(16, causal=True)
    first, *_ = inspect(model, BYTES, TEXT).layers
    why = "it does not say how its attention depends on its values"
    assert first.missing == (f"Average cannot show attention weights: {why}.",)


def test_a_masked_model_shows_losses_at_the_selected_tokens_alone() -> None:
    seen = inspect(build("flash", "mlm"), BYTES, TEXT * 5)
    known = [piece for piece in seen.pieces if piece.loss is not None]
    assert 0 < len(known) < len(seen.pieces) / 2
    assert "".join(piece.text for piece in seen.pieces) == TEXT * 5
    assert "no state grows" in seen.layers[0].missing[-1]
    seen = next(one for letter in "abcdefghij" if (one := inspect(build("flash", "mlm"), BYTES, letter)).loss is None)
    assert "No token of this text was predicted" in page(seen, "", {})


def test_a_prefix_is_read_in_both_directions_and_not_predicted() -> None:
    seen = inspect(build("flash", "prefix-lm"), BYTES, TEXT)
    half = len(TEXT) // 2
    assert seen.prefix == half - 1  # after the end of a document
    assert [piece.loss is None for piece in seen.pieces] == [place < half - 1 for place in range(len(TEXT))]
    assert seen.layers[0].weights["local"][:half, :half].triu(1).any()
    assert min(seen.layers[0].states) == half
    assert f"first {half - 1} tokens are the prefix" in page(seen, "", {})


def test_bytes_of_one_character_are_shown_as_one_character() -> None:
    seen = inspect(build("flash"), BYTES, "a中é")
    assert [(piece.text, len(piece.losses)) for piece in seen.pieces] == [("a", 1), ("中", 3), ("é", 2)]
    cut = inspect(build("flash"), BYTES, "a中é", max_tokens=3)
    assert [(piece.text, len(piece.losses)) for piece in cut.pieces] == [("a", 1), ("\ufffd", 2)]
    assert cut.left_out == 3
    assert "3 more tokens were left out" in page(cut, "", {})


def test_hostile_text_is_shown_as_text_on_a_page_that_loads_nothing(tmp_path: Path) -> None:
    seen = inspect(build("flash"), BYTES, TEXT)
    pieces = tuple(dataclasses.replace(seen.pieces[0], text=character) for character in HOSTILE)
    file = write_inspection(dataclasses.replace(seen, pieces=pieces), f"run {HOSTILE}", tmp_path / "out")
    source = file.read_text()
    shown = Shown(source)
    assert shown.text == HOSTILE.translate({ord(c): c.encode("unicode_escape").decode() for c in "\u202e\u2066\x00\x1b\ud800"})
    elements = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "div", "span", "i", "img"}
    assert {tag for tag, _ in shown.tags} <= elements
    assert not any(name.startswith("on") for _, attributes in shown.tags for name in attributes)
    assert "http" not in source.replace("http-equiv", "")
    assert "prefers-color-scheme: dark" in source
    sources = [attributes["src"] or "" for tag, attributes in shown.tags if tag == "img"]
    pictures = [(tmp_path / "out" / f"layer-0{number}.png").read_bytes() for number in (1, 2)]
    assert sources == [f"data:image/png;base64,{b64encode(picture).decode()}" for picture in pictures]
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert {path.name for path in file.parent.iterdir()} == {"index.html", "losses.png", "layer-01.png", "layer-02.png"}
    with pytest.raises(ArgumentError, match=r"out is .*, which exists already"):
        write_inspection(seen, "a run", tmp_path / "out")


def test_what_cannot_be_inspected_is_named() -> None:
    short = lineartime.build("linformer-tiny", task="mlm", d_model=16, n_blocks=1, n_heads=2, max_length=8).eval()
    for text, tokens, message in (
        ("", 512, "text is empty, but must hold at least one token"),
        ("a", 2049, "max_tokens is 2049, but must be"),
        ("a" * 9, 512, "text has 9 tokens, but this model reads at most 8"),
    ):
        with pytest.raises(ArgumentError, match=message):
            inspect(short, BYTES, text, tokens)
    assert inspect(short, BYTES, "a" * 9, max_tokens=8).left_out == 1
