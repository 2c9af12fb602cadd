# Two commands on a fresh machine with Python and pip: `make train` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: train test check format clean
train: $(VENV)/.runtime
	$(BIN)/longspan train

test: $(VENV)/.development
	$(BIN)/python -m pytest

check: $(VENV)/.development
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.development
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "longspan needs Python 3.10 or newer: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# setuptools is installed first and builds the package in place, so that the constraints hold for
# the build as well.
$(VENV)/.runtime: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -c constraints.txt setuptools
	$(PIP) install -c constraints.txt --no-build-isolation -e .
	@touch $@

$(VENV)/.development: $(VENV)/.runtime
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@
