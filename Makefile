# Every target runs its own set-up: no earlier step is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One thread per test process is the fastest on small machines, and the most repeatable. One process more than there are
# cores, because some tests wait; each takes a gigabyte and seconds to start, so no more than nine.
WORKERS ?= $(shell "$(PYTHON)" -c "import os; print(min(len(os.sched_getaffinity(0)), 8) + 1)")
# The tests of one file in one process: what they share is set up once, and gptqmodel is imported by few. Tests start
# hundreds of processes: what they import is compiled once, also where PYTHONDONTWRITEBYTECODE is set.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadfile --durations=10
# What `make bench` runs, and where its records go.
RECIPE ?= recipes/$(if $(shell "$(PYTHON)" scripts/install.py --gpus 2>/dev/null),paper-340m,mini).yaml
RUN := results/runs/$(basename $(notdir $(RECIPE)))

# Prints a qbench command, then runs it: make would also print the shell code around it.
SHOW := show() { echo "$(BIN)/qbench $$*"; $(BIN)/qbench "$$@"; }

.DEFAULT_GOAL := help
.PHONY: help setup bench check test test-all lint kernels bench-attention bench-quantize bench-scorer twins siblings mini-tasks docs clean

help: ## print this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

setup: $(VENV)/installed ## create .venv with the pinned packages; the driver decides the torch build, or TORCH=cpu|cuda
# A .venv made on a node without a GPU has a torch that cannot use one. This is checked when the target is made, hence
# the second expansion.
UNFIT = $(shell TORCH=$(TORCH) "$(PYTHON)" scripts/install.py --fits $(VENV) >/dev/null 2>&1 || echo unfit)
.SECONDEXPANSION:
$(VENV)/installed: pyproject.toml scripts/install.py $$(UNFIT)
	@TORCH=$(TORCH) "$(PYTHON)" scripts/install.py $(VENV)
	@touch $@
.PHONY: unfit
unfit:

bench: setup ## run a recipe (RECIPE=…), print its summary, write a report; default: the paper's with a GPU, else mini
	$(BIN)/qbench doctor $(RECIPE)
	@$(SHOW); show run $(RECIPE); status=$$?; \
	show table $(RUN) --kind summary && show table $(RUN) --format html --out $(RUN)/report.html; \
	exit $$status

# The gate reports failed cells (exit code 1).
check: setup ## the gate: run recipes/ci.yaml and compare it with the committed results/mini
	@$(SHOW); show run recipes/ci.yaml || [ $$? -eq 1 ]
	$(BIN)/qbench check results/runs/ci --baseline results/mini --junit results/runs/ci/gate.xml --json results/runs/ci/gate.json

test: setup ## all tests except the slow ones
	$(PYTEST)

test-all: setup lint ## ruff and mypy, then all tests, including the slow ones
	$(PYTEST) -m ''

lint: setup ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

kernels: setup ## compiler report for the attention kernels (ARCH=all: every GPU); with a GPU, also their speed
	PYTHONPATH=scripts $(BIN)/python -m kernels_report $(if $(ARCH),--arch $(ARCH))

bench-attention: setup ## compare softpick on the CPU with torch's softmax: time and memory, one thread
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/cpu_attention.py

bench-quantize: setup ## compare our GPTQ pass with gptqmodel's: time and memory
	$(BIN)/python benchmarks/quantize.py

bench-scorer: setup ## compare our scorer with lm-eval's: time, forwarded tokens and memory
	$(BIN)/python benchmarks/scorer.py
	$(BIN)/python benchmarks/cell.py

twins: setup ## train the mini twins, or resume an interrupted training: about 12 minutes on 2 cores
	PYTHONPATH=scripts $(BIN)/python -m mini.train twins $(if $(KEEP),--keep $(KEEP))

siblings: setup ## train the seven other kinds of attention: about 50 minutes; KEEP=500 keeps every 500th step
	PYTHONPATH=scripts $(BIN)/python -m mini.train siblings $(if $(KEEP),--keep $(KEEP))

mini-tasks: setup ## regenerate the items of the mini tasks and the calibration text
	PYTHONPATH=scripts $(BIN)/python -m mini.files

docs: setup ## regenerate the tables and plots of results/mini in README and docs
	$(BIN)/python docs/tables.py

clean: ## remove .venv, caches and build files
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
