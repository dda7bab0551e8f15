# Every target sets itself up: nothing needs a step before it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One thread per test process and one process per core: on small machines the fastest, and the most repeatable.
WORKERS ?= auto
# What `make bench` runs, and where its records go.
RECIPE ?= recipes/$(if $(shell $(PYTHON) scripts/install.py --gpus 2>/dev/null),paper-340m,mini).yaml
RUN := results/runs/$(basename $(notdir $(RECIPE)))

# Prints a command of qbench before it runs it: make would print the shell code around it as well.
SHOW := show() { echo "$(BIN)/qbench $$*"; $(BIN)/qbench "$$@"; }

.DEFAULT_GOAL := help
.PHONY: help setup bench check test test-all lint kernels bench-attention bench-quantize bench-scorer twins siblings mini-tasks docs clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

setup: $(VENV)/installed ## .venv with the pinned packages; the driver decides the build of torch, or TORCH=cpu|cuda
# Made on a node without a GPU, .venv has a torch that cannot use one: noticed when the target is made (expanded twice).
UNFIT = $(shell TORCH=$(TORCH) $(PYTHON) scripts/install.py --fits $(VENV) >/dev/null 2>&1 || echo unfit)
.SECONDEXPANSION:
$(VENV)/installed: pyproject.toml scripts/install.py $$(UNFIT)
	@TORCH=$(TORCH) $(PYTHON) scripts/install.py $(VENV)
	@touch $@
.PHONY: unfit
unfit:

bench: setup ## run a recipe (RECIPE=…) and print its tables: the paper's if there is a GPU, else mini
	$(BIN)/qbench doctor $(RECIPE)
	@$(SHOW); show run $(RECIPE); status=$$?; \
	show table $(RUN) --kind summary && show table $(RUN) && show table $(RUN) --kind damage && \
	show table $(RUN) --format html --out $(RUN)/report.html && \
	echo "report: $(RUN)/report.html"; \
	exit $$status

# A failed cell (exit code 1) is for the gate to report.
check: setup ## the gate: recipes/ci.yaml against the committed results/mini
	@$(SHOW); show run recipes/ci.yaml || [ $$? -eq 1 ]
	$(BIN)/qbench check results/runs/ci --baseline results/mini --junit results/runs/ci/gate.xml --json results/runs/ci/gate.json

test: setup lint ## lint, then the tests; the slow ones are left out
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS)

test-all: setup lint ## all tests, the slow ones too
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) -m ''

lint: setup ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

kernels: setup ## what the compilers report for the attention kernels (ARCH=all: every GPU); on a GPU, their speed too
	PYTHONPATH=scripts $(BIN)/python -m kernels_report $(if $(ARCH),--arch $(ARCH))

bench-attention: setup ## softpick on CPU and torch's softmax: time and memory, one thread
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/cpu_attention.py

bench-quantize: setup ## our GPTQ pass and gptqmodel's: time and memory
	$(BIN)/python benchmarks/quantize.py

bench-scorer: setup ## our scorer and lm-eval's: time, tokens forwarded and memory
	$(BIN)/python benchmarks/scorer.py
	$(BIN)/python benchmarks/cell.py

twins: setup ## train the mini twins from scratch, or resume an interrupted training: about 12 minutes on 2 cores
	PYTHONPATH=scripts $(BIN)/python -m mini.train twins $(if $(KEEP),--keep $(KEEP))

siblings: setup ## the same for the seven other kinds of attention: about 50 minutes; KEEP=500 keeps every 500th step
	PYTHONPATH=scripts $(BIN)/python -m mini.train siblings $(if $(KEEP),--keep $(KEEP))

mini-tasks: setup ## rewrite the items of the mini tasks and the calibration text
	PYTHONPATH=scripts $(BIN)/python -m mini.files

docs: setup ## rewrite the tables and plots of results/mini in README and docs
	$(BIN)/python docs/tables.py

clean: ## remove .venv and what tools left behind
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
