# make demo, make test: a fresh clone with python3 and make needs nothing else.
PYTHON ?= python3
SHELL := /bin/bash -o pipefail
VENV := .venv
BIN := $(VENV)/bin
export PYTHONDONTWRITEBYTECODE :=  # tests as pytest rewrites them are kept for the next of these commands
export FEDPACT_DATA ?= $(wildcard $(abspath ../shared/data))

.PHONY: install dev extras demo test drills drills-core drills-one drills-network test-extras check format bench clean

install: $(VENV)/installed
dev: $(VENV)/developed
extras: $(VENV)/extras

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/developed: pyproject.toml $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $@

$(VENV)/extras: pyproject.toml $(VENV)/developed
	$(BIN)/python -m pip install --quiet --editable ".[dev,torch,flax,equinox,ray,flower,secure,he]"
	@touch $@

demo: install
	$(BIN)/fedpact demo

test: dev
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not drill"

drills: drills-core drills-network

drills-core: dev  # runs killed and resumed, recordings replayed, the theory's long runs
	$(BIN)/python -m pytest -n 2 --dist worksteal -m drill

drills-one: dev  # of each kind one, where make test has none of it
	$(BIN)/python -m pytest -n 2 --dist worksteal -m drill --one-of-each --durations 12

test-extras: extras  # networks of PyTorch, Flax and Equinox; a Ray cluster; a Flower federation; sums on ciphertexts
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 12 tests_extras

drills-network: extras  # a real federation, each fault at three random moments: processes killed and stopped, messages that are wrong, a full disk, masked sums; a Ray cluster's workers; parity in both precisions; the log is kept
	{ FEDPACT_MOMENTS=3 $(BIN)/python -m pytest -n 2 --dist worksteal -vv -rP $(addprefix tests_extras/test_,flower.py faults.py messages.py secure_flower.py faults_vertical.py) && \
	FEDPACT_MOMENTS=3 $(BIN)/python -m pytest tests_extras/test_ray.py -k 'killed or local_engine_s_run or single' -s -vv --log-cli-level=WARNING; } | sed -u 's/\x1b\[33m(raylet).*//' | tee docs/drills.log

check: dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: dev
	$(BIN)/python benchmarks/core.py

clean:
	rm -rf $(VENV) build *.egg-info
