# Every target sets itself up: nothing needs a step before it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One thread a test process and one process a core: on small machines that is the fastest, and the most repeatable.
WORKERS ?= auto
# What `make bench` runs, and where its records go.
RECIPE ?= recipes/$(if $(shell nvidia-smi -L 2>/dev/null),paper-340m,mini).yaml
RUN := results/runs/$(basename $(notdir $(RECIPE)))

# A command of qbench, told before it runs: make would tell the shell around it as well.
TOLD := told() { echo "$(BIN)/qbench $$*"; $(BIN)/qbench "$$@"; }

.DEFAULT_GOAL := help
.PHONY: help setup bench check test test-all lint kernels bench-attention bench-quantize bench-scorer twins mini-tasks docs clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

setup: $(VENV)/installed ## .venv with the pinned packages, CUDA build or CPU build as the machine needs
$(VENV)/installed: pyproject.toml scripts/install.py
	$(PYTHON) scripts/install.py $(VENV)
	@touch $@

bench: setup ## run a recipe (RECIPE=…) and print its tables: the paper's where there is a GPU, mini elsewhere
	$(BIN)/qbench doctor
	@$(TOLD); told run $(RECIPE); status=$$?; \
	told table $(RUN) && told table $(RUN) --kind damage && \
	told table $(RUN) --format html --out $(RUN)/report.html && told table $(RUN) --kind summary && \
	echo "report: $(RUN)/report.html"; \
	exit $$status

# A failed cell (exit code 1) is for the gate to report.
check: setup ## the gate: recipes/ci.yaml against the committed results/mini
	@$(TOLD); told run recipes/ci.yaml || [ $$? -eq 1 ]
	$(BIN)/qbench check results/runs/ci --baseline results/mini --junit results/runs/ci/gate.xml --json results/runs/ci/gate.json

test: setup lint ## lint, then the tests; the slow ones are left out
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS)

test-all: setup lint ## all tests, the slow ones too
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) -m ''

lint: setup ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

kernels: setup ## what the compilers say of each attention kernel; on a GPU, its speed too
	PYTHONPATH=scripts $(BIN)/python -m kernels_report

bench-attention: setup ## softpick on CPU beside torch's softmax: time and memory, one thread
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/cpu_attention.py

bench-quantize: setup ## our GPTQ pass beside gptqmodel's own: time and memory
	$(BIN)/python benchmarks/quantize.py

bench-scorer: setup ## our scorer beside lm-eval's own: time, tokens forwarded and memory
	$(BIN)/python benchmarks/scorer.py
	$(BIN)/python benchmarks/cell.py

twins: setup ## train the mini twins again from nothing, or go on where it was stopped: about 12 minutes on 2 cores
	PYTHONPATH=scripts $(BIN)/python -m mini.twins

mini-tasks: setup ## write the items of the mini tasks and the calibration text again
	PYTHONPATH=scripts $(BIN)/python -m mini.files

docs: setup ## write what README and docs show of results/mini again: tables and plots
	$(BIN)/python docs/tables.py

clean: ## remove .venv and what tools left behind
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
