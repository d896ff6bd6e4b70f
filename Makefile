# make train      train the first example
# make test       run the tests            (make test-all: the slow ones too)
# make test-aot   compile for GPUs without one, and test what comes out
# make docs       build the site into site/, without a warning; open site/index.html
# make notebooks  run the notebooks anew, in place
# make gpu        measure on the GPU of this machine, with the JAX that python3 has: nothing is installed
# make lint       run the linter
# make types      run the type checker over the packages and a typed program that uses them
# make dist       build the sdist and the wheel, and install and use them elsewhere
# make clean      remove the environment and the caches
#
# Each target makes the environment it needs in $(VENV), and makes it again only when pyproject.toml has changed. The
# install is editable: edits of the source need no new install.
#
#   make test PYTHON=python3.12 VENV=.venv-3.12     another Python beside the first
#   make test ARGS="-k lars -x"                     arguments for pytest
#   make train ARGS="--optimizer lars --mode flat"  arguments for the example

PYTHON  ?= python3
VENV    ?= .venv
WORKERS ?= 2
ARGS    ?=
GPU_PYTHON ?= python3

BIN := $(VENV)/bin

.PHONY: train test test-all test-aot docs notebooks gpu lint types dist clean
.NOTPARALLEL:

train: $(VENV)/.installed-examples
	$(BIN)/python -m examples.mnist_mlp $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-all: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "slow or not slow" $(ARGS)

test-aot: $(VENV)/.installed-dev $(VENV)/.installed-aot
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "slow or not slow" tests/aot $(ARGS)

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

notebooks: $(VENV)/.installed-notebooks
	$(BIN)/python -m notebooks.execute $(ARGS)

gpu:
	$(GPU_PYTHON) -m benchmarks.gpu $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .

# Without the first variable pyright asks the network whether there is a newer one.
types: $(VENV)/.installed-dev
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python

dist: $(VENV)/.installed-dev
	$(BIN)/python .ci/check_dist.py

# One stamp for each extra of pyproject.toml. The environment itself is made first if there is none that runs.
$(VENV)/.installed-%: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("fusedopt needs Python 3.11 or newer; $(PYTHON) is " + sys.version)'
	@$(BIN)/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing fusedopt[$*] into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@

clean:
	rm -rf $(VENV) .nox dist site .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
