# make demo, make test: a fresh clone with python3 and make needs nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export FEDPACT_DATA ?= $(wildcard $(abspath ../shared/data))

.PHONY: install dev demo test check format bench clean

install: $(VENV)/installed
dev: $(VENV)/developed

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/developed: pyproject.toml $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $@

demo: install
	$(BIN)/fedpact demo

test: dev
	$(BIN)/python -m pytest -n 2 --dist loadfile

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
