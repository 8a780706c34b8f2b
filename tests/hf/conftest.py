import shutil
from pathlib import Path

import pytest
from tests.hf.tiny import causal_model
from transformers.utils import logging

import lineartime
from lineartime.data import ByteTokenizer
from lineartime.hf import LineartimeForCausalLM, convert


@pytest.fixture(autouse=True)
def quiet() -> None:
    """No progress bars, and no warnings."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()


@pytest.fixture
def causal() -> LineartimeForCausalLM:
    """A causal language model of FLASH."""
    return causal_model()


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of bytes: `own` as lineartime saves it, and `hf` for transformers."""
    place = tmp_path_factory.mktemp("saved")
    model = lineartime.build("flash-tiny", n_blocks=2, d_model=16, d_qk=8, chunk_size=8).eval()
    lineartime.save(model, ByteTokenizer(), place / "own")
    convert(place / "own", place / "hf")
    return place


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A model of bytes, saved for transformers; `own` beside it is the same model of lineartime."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    return tmp_path / "hf"
