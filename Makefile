# A fresh machine needs Python 3.11 or newer and nothing else. Each target extends the one environment, .venv.
PYTHON ?= python3
# Compiled modules are kept, whatever the environment says: tests start hundreds of interpreters.
export PYTHONDONTWRITEBYTECODE :=
# Tests fork a thousand times: large pages take a fifth of the time off a fork of a process that imported much.
export GLIBC_TUNABLES := glibc.malloc.hugetlb=1
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

UV := $(shell command -v uv 2>/dev/null)
ifdef UV
# uv does not read pip's settings, which may say where wheels are.
pip_setting = $(shell $(PYTHON) -m pip config get global.$(1) 2>/dev/null)
VENV = uv venv --quiet --seed --python $(PYTHON) .venv
INSTALL = UV_FIND_LINKS="$(call pip_setting,find-links)" uv pip install --quiet --python $(BIN)/python
else
VENV = $(PYTHON) -m venv .venv
# Modules are compiled when they are first imported: compiling all of torch takes longer than installing it.
INSTALL = $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile
endif

.PHONY: help demo test test-slow test-deepspeed test-all test-gpu test-gpus mutants mutation-score soak lint format bench release clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       train a small network to read handwritten digits, in a minute"
	@echo "make test       run the tests of the core: about five minutes on two cores"
	@echo "make test-slow  run the tests that make test leaves out"
	@echo "make test-deepspeed  run the tests that need DeepSpeed, in an environment of their own"
	@echo "make test-all   run all tests, as .ci/run does"
	@echo "make test-gpu   run what only a GPU with CUDA shows; make test-gpus: what only several show"
	@echo "make mutants    break 80 lines, one at a time, and see that a test fails for each"
	@echo "make soak       inject faults by the hundred, write docs/faults.md, train for longer on each mesh, look for leaks"
	@echo "make mutation-score  break the core at random, and count what the tests notice: about an hour"
	@echo "make lint       check format, style, types, imports and documentation"
	@echo "make format     format the code"
	@echo "make bench      measure what the engine costs per step"
	@echo "make release    build wheel and sdist of the last commit twice, and compare them"
	@echo "make clean      remove .venv and everything that was built"

demo: .venv/with-sklearn
	$(BIN)/python examples/digits.py --output_dir runs

test: .venv/with-test
	$(PYTEST) -m "not slow"

test-slow: .venv/with-test
	$(PYTEST) -m slow

# Only these tests see DeepSpeed: Accelerate and others import it wherever they find it, which takes seconds each time.
test-deepspeed: .venv/with-deepspeed-apart
	PYTHONPATH=$(CURDIR)/$(DEEPSPEED) DS_BUILD_OPS=0 $(BIN)/python -m pytest -n auto --maxprocesses 3 --dist loadfile \
		tests/strategies/test_deepspeed*.py tests/trainer/fit/test_deepspeed_runs.py tests/commands/test_launch_deepspeed.py \
		tests/test_examples.py::test_stages_of_zero_print_the_same_losses \
		tests/accelerate_scripts/test_self_checks.py::test_accelerates_own_scripts_pass_with_deepspeed

# In one session, but for DeepSpeed's tests: what all tests import is imported once.
test-all: .venv/with-test test-deepspeed
	$(PYTEST)

# By themselves: a fork of a process that has used a GPU cannot train, and most other tests fork.
test-gpu: .venv/with-test
	$(BIN)/python -m pytest -n 0 -m gpu tests/gpu -ra

test-gpus: .venv/with-test
	$(BIN)/python -m pytest -n 0 -m gpus tests/gpu -ra

mutants: .venv/with-test
	$(BIN)/python -m tests.mutants

mutation-score: .venv/with-test
	$(BIN)/python -m tests.mutation_score

soak: .venv/with-test
	$(BIN)/python -m pytest -m fault --soak
	$(BIN)/python -m pytest tests/trainer/fit/test_split_runs.py --soak
	$(BIN)/python -m tests.faults.ledger
	$(BIN)/python -m benchmarks.run_memory --soak

lint: .venv/with-dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/lint-imports
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m tests.release.check_types
	$(BIN)/mkdocs build --strict  # with --quiet it counts no warnings
	$(BIN)/python -m tests.mutants --list >/dev/null
	$(BIN)/python -m tests.mutation_score --list >/dev/null

format: .venv/with-dev
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: .venv/with-bench
	$(BIN)/python -m benchmarks

release: .venv/with-test
	$(BIN)/python -m tests.release.build dist

clean:
	rm -rf .venv build dist SHA256SUMS site *.egg-info .pytest_cache .ruff_cache .import_linter_cache .coverage htmlcov

# torch goes first: the other packages are then resolved against the version that is there.
.venv/with-torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "trainer_lib needs Python 3.11 or newer; name one with: make PYTHON=python3.11 ..." >&2; exit 1; }
	@echo "Making .venv and installing torch into it ..."
	@test -x $(BIN)/python || $(VENV)
	@$(INSTALL) -c constraints.txt torch
	@touch $@

.venv/with-%: .venv/with-torch pyproject.toml
	@echo "Installing trainer_lib[$*] into .venv ..."
	@$(INSTALL) -c constraints.txt -e '.[$*]'
	@touch $@

# DeepSpeed is built against the torch that is there, and compiles its operations when they are used, or never.
DEEPSPEED := .venv/deepspeed
.venv/with-deepspeed-apart: .venv/with-test
	@echo "Installing DeepSpeed into $(DEEPSPEED) ..."
	@DS_BUILD_OPS=0 $(INSTALL) -c constraints.txt --no-build-isolation --no-deps --upgrade --target $(DEEPSPEED) \
		deepspeed einops hjson ninja py-cpuinfo
	@touch $@
