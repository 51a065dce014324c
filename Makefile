# Every target makes what it needs, from a fresh clone with Python >= 3.11 and pip:  make test PYTHON=python3.12
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOWEST := $(VENV)/lowest
# Without bytecode of all modules, which takes longer than the rest: Python keeps that of what it imports.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

# Four tests at a time on two cores: many start ranks of their own, which wait for one another half of the time.
TESTS := $(BIN)/python -m pytest -n 4

# Each of a suite's processes would compile anew what the first could have kept.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-all lowest parity-full drills check bench docs

help:
	@echo "make demo       train, evaluate and sample a small model-parallel GPT on bundled text"
	@echo "make test       the test suite"
	@echo "make test-slow  the tests that take minutes; make test-all runs both"
	@echo "make lowest     the test suite with the oldest versions that the run time may have"
	@echo "make parity-full  all layouts with all schedules, an hour at a time: results under benchmarks/results"
	@echo "make drills     kills, damage, full disks, signals, restarts: hours; goes on where it stopped, results likewise"
	@echo "make check      lint, formatting, types, architecture"
	@echo "make bench      the benchmarks, with results under benchmarks/"
	@echo "make docs       the generated reference page, docs/reference/config.md"

# Two steps, so that the demo does not wait for the test tools. Each is done again when its inputs change.
$(VENV)/.run: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Colonnade needs Python 3.11 or newer; \
	$(PYTHON) is %d.%d. Name a newer one: make PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	@touch $@

$(VENV)/.test: $(VENV)/.run
	$(PIP) -e ".[test,zstd,data]"
	@touch $@

demo: $(VENV)/.run
	$(BIN)/colonnade demo

test: $(VENV)/.test
	$(TESTS)

test-slow: $(VENV)/.test
	$(TESTS) -m slow

test-all: $(VENV)/.test
	$(TESTS) -m "slow or not slow"

# Those of the run time: extras and test tools are new ones, and want newer ones of some.
lowest:
	$(PYTHON) -m venv --clear $(LOWEST)
	$(PYTHON) -m tests.lowest > $(LOWEST)/run.txt
	$(LOWEST)/bin/python -m pip install --quiet --no-compile -c $(LOWEST)/run.txt -e .
	$(LOWEST)/bin/python -m pip install --quiet --no-compile -e ".[test,zstd,data]"
	$(LOWEST)/bin/python -m pytest -n 4

parity-full: $(VENV)/.test
	$(BIN)/python -m tests.parity.full

drills: $(VENV)/.test
	$(BIN)/python -m tests.drills.full

check: $(VENV)/.test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy src benchmarks
	$(BIN)/python -m pytest --quiet tests/test_architecture.py

bench: $(VENV)/.test
	$(BIN)/python -m benchmarks.run_all

docs: $(VENV)/.run
	$(BIN)/python -m colonnade.reference
