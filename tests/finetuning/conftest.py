import json
import string
from pathlib import Path
from typing import Any

import pytest
import torch

import lineartime
from lineartime.data.tokenizers import ByteTokenizer

LETTERS = string.ascii_lowercase


def article(first: int, count: int = 6) -> dict[str, Any]:
    """Questions whose answer is the only digit of the text."""
    paragraphs = []
    for place in range(first, first + count):
        before, number = LETTERS[: 3 + 5 * place % 19], str(place % 10)
        text = f"{before} {number} {LETTERS[place % 9 :]}"
        answers = [{"text": number, "answer_start": len(before) + 1}]
        paragraphs.append({"context": text, "qas": [{"id": f"q{place}", "question": "which?", "answers": answers}]})
    return {"title": str(first), "paragraphs": paragraphs}


@pytest.fixture(scope="session")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of five articles, of which the first is held out."""
    file = tmp_path_factory.mktemp("questions") / "numbers.json"
    file.write_text(json.dumps({"version": "1.1", "data": [article(6 * place) for place in range(5)]}))
    return file


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A masked model that was not trained."""
    folder = tmp_path_factory.mktemp("pretrained") / "model"
    torch.manual_seed(0)  # the seed of each test comes after the fixtures of a session
    model = lineartime.build("flash-tiny", "mlm", vocab_size=258, d_model=16, n_blocks=2, d_qk=8, chunk_size=16)
    lineartime.save(model, ByteTokenizer(), folder)
    return folder
