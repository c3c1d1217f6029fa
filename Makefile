# Everything a newcomer needs. PYTHON is the interpreter that .venv is created with.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# .venv is rebuilt when the packages to install have changed.
READY := $(VENV)/.installed

.PHONY: install train test test-slow test-cuda faults gate gate-baseline lint format clean

install: $(READY)

$(READY): pyproject.toml setup.py constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

train: $(READY)
	$(BIN)/python tools/train_net.py

# Test files run in parallel, one per core, in their order: those of whole runs, which take longest, come first. A process
# computes and compiles with one thread, because the others use the other cores. Byte code is kept even where the
# environment says not to: without it the tests take a third longer to collect, and each process longer to start.
# A process that hangs outside Python does not hear of the test's own limit: it ends with the stacks of its threads, and
# with it the tests, because another process would begin with the same test.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 $(BIN)/python -m pytest \
	-n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 \
	-o faulthandler_exit_on_timeout=true

test: $(READY)
	$(PYTEST) -o faulthandler_timeout=400

# SLICE="--minutes 12 --turn 3" begins with the fourth file and starts no test after 12 minutes.
test-slow: $(READY)
	$(PYTEST) -o faulthandler_timeout=3900 -m slow $(SLICE)

# Three files at a time on one GPU: most of their time goes into starting, and into compiling on a core or two.
test-cuda: $(READY)
	$(BIN)/python -m pytest -m cuda -n 3 --dist loadfile $(SLICE)

# Kills, full disks, lost ranks, damaged files, odd values: SECURITY.md. SEED=2 tries others.
SEED ?= 1
faults: $(READY)
	$(BIN)/python -m tests.faults --seed $(SEED) --minutes 30

# A small ladder, compared with a stored baseline; see docs/ledger.md. Only ratios of speeds, and only losses of more than
# half, because test machines are shared. The baseline is from a CPU, so a GPU is hidden.
GATE := --config-name vit_digits ladder=tests/gate/ladder.yaml schedule.epochs=20 data.num_workers=0 \
	trackers=[] runs_at_most=16 margin=2 rounds=4 steps=5 warmup_steps=2 seconds=0 numerics_steps=5 gradients=false jobs=2

gate: $(READY)
	rm -rf runs/gate
	CUDA_VISIBLE_DEVICES= $(BIN)/python tools/ledger.py $(GATE) output=runs/gate
	$(BIN)/python tools/ledger.py check tests/gate/baseline.json runs/gate/ledger.json tolerance=0.5 absolute=false

gate-baseline: $(READY)
	rm -rf runs/gate
	CUDA_VISIBLE_DEVICES= $(BIN)/python tools/ledger.py $(GATE) output=runs/gate
	cp runs/gate/ledger.json tests/gate/baseline.json

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
