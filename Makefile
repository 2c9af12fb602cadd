# Two commands on a fresh machine with Python and pip: `make train` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: train test check format clean data fuzz drill elastic compile gpu kernels nvme parity slurm soak
train: $(VENV)/.runtime
	$(BIN)/longspan train

# Two processes with one thread each; the tests of a file share a pool of ranks, and stay together.
test: $(VENV)/.development
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

check: $(VENV)/.development
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.development
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Longer than `make test`: crafted checkpoints, Hugging Face folders, token shards, tokenizers and
# run files; and a run broken forty times.
fuzz: $(VENV)/.development
	LONGSPAN_FUZZ_CASES=100000 $(BIN)/python -m pytest tests/test_fuzz.py
	LONGSPAN_FUZZ_CASES=10000 $(BIN)/python -m pytest tests/test_security.py tests/data/test_fuzz.py

drill: $(VENV)/.development
	LONGSPAN_SLOW=1 $(BIN)/python -m pytest tests/test_drill.py
	$(BIN)/longspan drill --nproc 2 --faults 20 --seed 7
	$(BIN)/longspan drill --nproc 4 --faults 20 --seed 8

# Memory of `longspan data build` on 2 GB of JSON Lines, by bytes and by a tokenizer; 8 GB of disk.
data: $(VENV)/.development
	LONGSPAN_SLOW=1 $(BIN)/python -m pytest -s tests/data/test_memory.py

# Under torchrun: a worker is killed in every start; nodes are cut off in network namespaces: a hot
# spare takes the place of one, then the rendezvous host is lost; a pod of Kubernetes is replaced; a
# run out of memory resumes with half the micro-batch.
elastic: $(VENV)/.development
	LONGSPAN_SLOW=1 $(BIN)/python -m pytest tests/launching tests/training/test_recovery.py

# Blocks compiled within sequence and tensor parallelism; make test compiles them in one process.
compile: $(VENV)/.development
	LONGSPAN_SLOW=1 $(BIN)/python -m pytest tests/parallel/test_apply.py tests/nn -k compiled

# Layouts and engines in more combinations than `make test` has time for.
parity: $(VENV)/.development
	LONGSPAN_SLOW=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile tests/parallel \
	  tests/engines tests/planning tests/training/test_trainer.py tests/training/test_lora.py \
	  tests/training/test_tuning.py tests/training/test_parameter_precision.py tests/test_verification.py tests/benchmarks

# Those tests that need a GPU; eight processes share it, since most of the time is compilation.
gpu: $(VENV)/.development
	$(BIN)/python -m pytest -m gpu -n 8

# Every configuration of the GPU kernels, compiled for an H100; it needs no GPU.
kernels: $(VENV)/.development
	LONGSPAN_KERNELS=1 $(BIN)/python -m pytest tests/attention/kernels

# A job of two nodes is submitted to a real Slurm, requeued and resumed: wants root and Debian's
# slurmctld, slurmd and munge.
slurm: $(VENV)/.development
	PATH="$(CURDIR)/$(BIN):$$PATH" LONGSPAN_SLURM=1 $(BIN)/python -m pytest tests/launching/test_slurm.py

# DeepSpeed's parameters and optimizer state on a disk: wants libaio-dev and g++, and compiles for
# minutes the first time.
nvme: $(VENV)/.development
	PATH="$(CURDIR)/$(BIN):$$PATH" LONGSPAN_NVME=1 $(BIN)/python -m pytest tests/engines/test_nvme.py

# Memory, threads and files over 5,000 steps with every sink; and what tracking costs of a step.
soak: $(VENV)/.development
	LONGSPAN_SLOW=1 $(BIN)/python -m pytest -s tests/training/test_soak.py
	$(BIN)/longspan bench tracking

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
