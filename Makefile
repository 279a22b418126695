# All that a fresh machine needs is Python 3.11 or newer; each target makes .venv when it is missing or out of date.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help demo test soak lint format bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    train a small network to read handwritten digits"
	@echo "make test    run the tests"
	@echo "make soak    inject faults by the hundred, and write docs/faults.md"
	@echo "make lint    check format, style, types, imports and documentation"
	@echo "make format  put the code into format"
	@echo "make bench   measure what the engine costs per step"
	@echo "make clean   remove .venv and all that was built"

demo: .venv/with-test
	$(BIN)/python examples/digits.py

test: .venv/with-test
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

soak: .venv/with-test
	$(BIN)/python -m pytest -m fault --soak
	$(BIN)/python -m tests.faults.ledger

lint: .venv/with-dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/lint-imports
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/mkdocs build --strict --quiet

format: .venv/with-dev
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: .venv/with-bench
	$(BIN)/python -m benchmarks

clean:
	rm -rf .venv build dist site *.egg-info .pytest_cache .ruff_cache .import_linter_cache .coverage htmlcov

# torch goes first: what follows is then resolved against the version that is there.
.venv/with-torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "trainer_lib needs Python 3.11 or newer; name one with: make PYTHON=python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(PIP) install --quiet -c constraints.txt torch
	@touch $@

.venv/with-%: .venv/with-torch pyproject.toml
	$(PIP) install --quiet -c constraints.txt -e '.[$*]'
	@touch $@
