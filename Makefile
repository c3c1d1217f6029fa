# Everything a newcomer needs. PYTHON chooses the interpreter that .venv is made with.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# .venv is made again when what is to be installed has changed.
READY := $(VENV)/.installed

.PHONY: install train test test-slow test-cuda lint format clean

install: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

train: $(READY)
	$(BIN)/python tools/train_net.py

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

test-slow: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow

test-cuda: $(READY)
	$(BIN)/python -m pytest -m cuda

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
