"""The server of transformers with a model of lineartime."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from tests.hf.tiny import GREEDY

from lineartime.data import ByteTokenizer
from lineartime.hf import LineartimeConfig, LineartimeForCausalLM, fast_tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of a server of a tiny model of bytes, and the folder of the model."""
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("server")
    folder = place / "model"
    config = LineartimeConfig.from_preset("flash-tiny", vocab_size=258, d_model=16, n_blocks=1, d_qk=8, chunk_size=8)
    LineartimeForCausalLM(config).save_pretrained(folder)
    fast_tokenizer(ByteTokenizer()).save_pretrained(folder)
    command = [sys.executable, "-m", "lineartime.hf", "serve", str(folder), "--port", "0", "--device", "cpu"]
    output = place / "log.txt"
    with output.open("w") as log, subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
    ) as process:  # fmt: skip
        try:
            yield _address(process, output), folder
        finally:
            process.kill()


def _address(process: "subprocess.Popen[bytes]", output: Path) -> str:
    """Where the server listens, as soon as it does."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"running on (http://\S+)", output.read_text()):
            return found[1]
        time.sleep(0.1)
    pytest.fail(output.read_text())


def drawn_by_generate(folder: Path, prompt: bytes) -> list[int]:
    ids = torch.tensor([list(prompt)])
    tokens: list[int] = LineartimeForCausalLM.from_pretrained(folder).generate(ids, **GREEDY)[0, ids.shape[1] :].tolist()
    return tokens


def test_a_client_of_openais_protocol_gets_the_text_that_generate_gives(server: tuple[str, Path]) -> None:
    address, folder = server
    expected = bytes(drawn_by_generate(folder, b"the text")).decode(errors="replace")
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client:
        ask = partial(client.completions.create, model=str(folder), prompt="the text", max_tokens=4)
        assert ask().choices[0].text == expected
        with ask(stream=True) as pieces:
            streamed = "".join(piece.choices[0].text for piece in pieces if piece.choices)
        # Bytes at the end that are no whole character are not streamed.
        assert streamed.rstrip("\ufffd") == expected.rstrip("\ufffd")

        # A chat is continued at the turn of the assistant.
        hello: Any = [{"role": "user", "content": "hello"}]
        answer = client.chat.completions.create(model=str(folder), messages=hello, max_tokens=4)
        assert [model.id for model in client.models.list()] == [str(folder)]
        for wrong, message in (({"prompt": ""}, "begin an empty prompt with"), ({"max_tokens": -5}, "must be greater than 0")):
            with pytest.raises(openai.BadRequestError, match=message):
                ask(**wrong)
    drawn = drawn_by_generate(folder, b"user: hello\nassistant:")
    expected = fast_tokenizer(ByteTokenizer()).decode(drawn, skip_special_tokens=True)
    assert answer.choices[0].message.content == expected


@pytest.mark.nightly
def test_chat_talks_to_the_server(server: tuple[str, Path]) -> None:
    address, folder = server
    command = [sys.executable, "-m", "lineartime.hf", "chat", str(folder), f"{address}/v1", "max_new_tokens=4"]
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}  # see tests/conftest.py
    chat = subprocess.run(
        [*command, "do_sample=False"], input=b"hello\nN\n!exit\n", env=environment, cwd=folder, capture_output=True, timeout=300
    )
    assert chat.returncode == 0, chat.stderr.decode()
    assert b"4 tokens in" in chat.stdout
