# `make train` and `make test` are all a fresh machine needs: each makes the virtual environment first, where it is not there yet.

PYTHON ?= python3
VENV ?= .venv
RUN ?= runs/quick
BIN = $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: train test test-nightly test-all docs dist lint types clean

train: $(VENV)/installed
	$(BIN)/lineartime train --out $(RUN) $$(ls -d $(RUN)/step-* >/dev/null 2>&1 && echo --resume || echo --recipe quick)
	$(BIN)/lineartime eval $(RUN)
	$(BIN)/lineartime generate $(RUN) --prompt "$$(printf 'import os\n\n\nclass Reader:\n    def __init__(self, ')" --max-tokens 110 --seed 1

test: $(VENV)/installed
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not nightly"

# What takes long and guards no daily promise: learning, kernels compiled for other GPUs, distributions, the site.
test-nightly: $(VENV)/installed
	$(BIN)/python -m pytest -n auto --dist worksteal -m nightly

test-all: test test-nightly

docs: $(VENV)/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# A wheel and a source distribution in dist/; the test installs both in empty environments.
dist: $(VENV)/installed
	$(BIN)/python -m pytest -q tests/test_dist.py
	rm -rf dist
	$(BIN)/python -c "from setuptools.build_meta import build_sdist, build_wheel; build_sdist('dist'); build_wheel('dist')"

lint: $(VENV)/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/installed
	$(BIN)/mypy
	MYPYPATH=src:benchmarks $(BIN)/mypy benchmarks

# pip takes the pinned versions; without them it would look for the newest PyTorch.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) runs site dist
