"""Threads at once, another default device, terminals that are gone, and tokenizers from elsewhere."""

import base64
import errno
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lineartime
from lineartime.checkpoint import last_checkpoint
from lineartime.data import ByteTokenizer, TokenStream, read_tokenizer
from lineartime.errors import LineartimeError
from lineartime.evaluation import evaluate_carried, evaluate_windowed
from lineartime.generation import Sampling, TextBatch, generate


def at_once(*actions: Callable[[], Any]) -> list[Any]:
    """The results of actions that begin at the same moment, each in a thread of its own."""
    barrier = threading.Barrier(len(actions), timeout=60)

    def run(action: Callable[[], Any]) -> Any:
        barrier.wait()
        return action()

    with ThreadPoolExecutor(len(actions)) as pool:
        return list(pool.map(run, actions))


@pytest.mark.parametrize(
    ("system", "options"),
    [("flash", {}), ("flash-next", {"token_shift": True}), ("flash-quad", {}), ("transformer++", {})],
)
def test_threads_that_generate_from_one_model_get_what_each_would_get_alone(
    system: str, options: dict[str, Any], tiny: Callable[..., Any]
) -> None:
    def text(model: Any, seed: int) -> list[int]:
        prompt = torch.randint(0, 256, (3 + 5 * seed,), generator=torch.Generator().manual_seed(seed))
        return list(lineartime.generate(model, prompt, 30, Sampling(seed=seed)))

    models = [tiny(system, **options).eval() for _ in range(2)]  # the tables of the second are not made yet
    models[1].load_state_dict(models[0].state_dict())
    alone = [text(models[0], seed) for seed in range(4)]
    assert at_once(*[lambda seed=seed: text(models[1], seed) for seed in range(4)]) == alone


def test_trainings_in_one_folder_exclude_each_other(config: Callable[..., Any]) -> None:
    def train() -> Any:
        try:
            return lineartime.train(config(steps=3))
        except LineartimeError as error:
            return str(error)

    *refused, finished = sorted(at_once(train, train, train), key=lambda result: not isinstance(result, str))
    assert all("which another run is using: wait" in said or "already holds a run" in said for said in refused)
    assert finished.finished
    lineartime.load(last_checkpoint(finished.run))


PENALISED = Sampling(repetition_penalty=1.5, seed=3)


def test_default_device_changes_no_result(tiny: Callable[..., Any]) -> None:
    tokenizer = ByteTokenizer()
    model, masked = tiny().eval(), tiny(task="mlm").eval()
    text = TokenStream("noise", np.arange(50, dtype=np.uint16), 50)
    sizes: dict[str, Any] = {"context_length": 8, "batch_size": 3, "bf16": False}

    def batch() -> object:
        texts = TextBatch(model, Sampling(seed=3))
        numbers = [texts.add(tokenizer.encode("ab"), sampling=sampling) for sampling in (None, PENALISED)]
        return numbers, [texts.step() for _ in range(4)]

    uses: list[Callable[[], object]] = [
        lambda: list(generate(model, tokenizer.encode("a prompt"), 12, PENALISED)),
        batch,
        lambda: evaluate_windowed(model, text, tokenizer, stride=4, **sizes),
        lambda: evaluate_windowed(masked, text, tokenizer, stride=8, packed=True, **sizes),
        lambda: evaluate_carried(model, text, tokenizer, segment=7, bf16=False),
    ]
    expected = [compute() for compute in uses]
    with torch.device("meta"):
        assert [compute() for compute in uses] == expected


class Broken(io.StringIO):
    """A stream that nobody reads any more."""

    def write(self, text: str) -> int:
        raise OSError(errno.EPIPE, os.strerror(errno.EPIPE))


@pytest.mark.pictures
@pytest.mark.parametrize(
    "stream",
    [Broken(), None, io.TextIOWrapper(io.BytesIO(), "ascii", "strict")],
    ids=["broken pipe", "closed", "ASCII"],
)
def test_training_goes_on_where_messages_cannot_be_written(
    config: Callable[..., Any], stream: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    result = lineartime.train(config(steps=2, out=tmp_path / "日本"))
    assert result.finished
    assert (tmp_path / "日本" / "loss.png").exists()


@pytest.mark.slow
def test_output_that_cannot_be_written_is_a_sentence_and_characters_are_no_error() -> None:
    def run(script: str, **environment: str) -> tuple[int, str, str]:
        settings = {**os.environ, **environment}
        found = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, env=settings, timeout=100)
        return found.returncode, found.stdout, found.stderr

    version = f"{sys.executable} -m lineartime --version"
    sentence = "error: Cannot write the output or a file: No space left on device; free some space, then try again.\n"
    assert run(f"{version} > /dev/full") == (1, "", sentence)
    assert run(f"{version} | true; exit ${{PIPESTATUS[0]}}") == (0, "", "")  # as `head` closes it
    script = "from lineartime.screen import open_standard_streams as o; o(); print('\\u65e5 \\udcff')"
    assert run(f'{sys.executable} -c "{script}"', PYTHONIOENCODING="ascii")[1] == "\\u65e5 \\udcff\n"


BPE: dict[str, Any] = {"type": "BPE", "vocab": {"a": 0, "b": 1, " ": 2}, "merges": []}
CHUNKS_OF_NOTHING = {"pre_tokenizer": {"type": "FixedLength", "length": 0}}


def definition(**stages: Any) -> str:
    """A tokenizer of three characters with other stages."""
    others = dict.fromkeys(["truncation", "padding", "post_processor", "normalizer", "pre_tokenizer", "decoder"])
    return json.dumps({"version": "1.0", "added_tokens": [], "model": BPE, **others, **stages})


def charsmap(content: bytes) -> dict[str, str]:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "{}",
        "\xff\xfe",
        '{"normalizer": ' + "[" * 50_000,
        definition(decoder=3),
        definition(pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}),
        definition(normalizer=charsmap(b"ab")),  # at which the library panics
    ],
)
def test_what_is_no_definition_is_a_sentence(content: str, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(content, encoding="latin1")
    with pytest.raises(
        LineartimeError, match=r"tokenizer.json is not a tokenizer file \(.+\): give a tokenizer.json"
    ) as caught:
        read_tokenizer(file)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_panic_of_the_library_is_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(definition(decoder={"type": "Strip", "content": "a", "start": 5, "stop": 5}))
    with pytest.raises(LineartimeError, match=r"^The tokenizer .*tokenizer.json cannot decode tokens \(.+\)\.$"):
        read_tokenizer(file).decode([0])
    file.write_text(definition(**CHUNKS_OF_NOTHING))
    with pytest.raises(LineartimeError, match=r"^The tokenizer .*tokenizer.json cannot encode the text \(.+\)\.$"):
        read_tokenizer(file).encode("a")
