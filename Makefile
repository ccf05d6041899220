# Every target sets itself up: it finds a Python 3.11 to 3.13, creates .venv, installs the pinned
# dependencies once, and runs. The stamp's name holds a checksum of what is installed, so a second run
# starts at once and a changed pin reinstalls.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := venv
.NOTPARALLEL:

VENV ?= .venv
# Extra arguments for pip, say an index that holds CPU builds of torch.
PIP_ARGS ?=
# Tests start several processes: one thread each keeps them from fighting over cores.
THREADS ?= 1
# Test processes side by side; what uses a pool of gloo processes stays on one of them.
WORKERS ?= 2
PYTEST_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt hatch_build.py src/lrmoe/ops/cpu/*.[ch] | cksum | tr ' ' '-')
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder
RUN := OMP_NUM_THREADS=$(THREADS) MKL_NUM_THREADS=$(THREADS) HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

.PHONY: venv test test-all lint typecheck format pytest demo docs headline headline-quick figures bench clean help

venv: $(STAMP)  ## create .venv with everything installed (the default)

$(STAMP):
	@bash tools/make_venv.sh "$(VENV)"
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) \
	    -e ".[transformers,report,traces,trl,dev]" -c constraints.txt
	@rm -f $(VENV)/.installed-* && touch $@
	@echo "ready: $(BIN)/lrmoe (activate with: source $(BIN)/activate)"

test: lint typecheck pytest  ## everything CI runs: lint, format, types, tests

lint: $(STAMP)  ## ruff: rules and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

typecheck: $(STAMP)  ## mypy
	@$(BIN)/mypy

format: $(STAMP)  ## let ruff fix and format the tree
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

pytest: $(STAMP)  ## the tests alone, long ones left out; PYTEST_ARGS="-k layer" narrows them
	@$(RUN) $(PYTEST) -m "not long" $(PYTEST_ARGS)

test-all: lint typecheck  ## with the long tests: benchmarks and experiments in small
	@$(RUN) $(PYTEST) $(PYTEST_ARGS)

demo: $(STAMP)  ## train with and without LRMoE to the same loss, on two CPU processes
	@$(RUN) $(BIN)/lrmoe compare --preset demo --name demo --overwrite
	@echo "figures: $(CURDIR)/runs/demo/summary.json"
	@echo "report:  $(CURDIR)/runs/demo/report.html"

docs: $(STAMP)  ## regenerate the reference pages from the code, and the benchmarks page from committed results
	@$(BIN)/python tools/gen_reference.py
	@$(BIN)/python tools/gen_benchmarks.py

headline: $(STAMP)  ## time to loss against every system, into docs/results.md; resumable, at most 90 minutes on 2 cores
	@$(RUN) $(BIN)/python benchmarks/headline.py
	@$(BIN)/python tools/fill_results.py runs/headline

headline-quick: $(STAMP)  ## the same with one model, one seed and four systems: under 10 minutes
	@$(RUN) $(BIN)/python benchmarks/headline.py --quick

figures: demo  ## run the demo and the layer benchmark, and put their figures into the README
	@$(BIN)/python benchmarks/layer.py --json > runs/layer.jsonl
	@$(BIN)/python tools/fill_figures.py runs/demo/summary.json runs/layer.jsonl

# What `make bench` runs; link is left out where network namespaces cannot be made.
BENCH := layer scaling ops planning wire budget stash unbiased fidelity fuzz link

bench: $(STAMP)  ## CPU benchmarks into runs/bench, held against benchmarks/results; BENCH="layer ops" narrows them
	@mkdir -p runs/bench && rm -f runs/bench/*
	@failed=""; for name in $(BENCH); do \
	    echo "bench: $$name" >&2; \
	    $(BIN)/python benchmarks/$$name.py --json > runs/bench/$$name.part || failed="$$failed $$name"; \
	    if [ -s runs/bench/$$name.part ]; then mv runs/bench/$$name.part runs/bench/$$name.jsonl; fi; \
	done; \
	rm -f runs/bench/*.part; \
	$(BIN)/python tools/compare_bench.py runs/bench || failed="$$failed compare_bench"; \
	if [ -n "$$failed" ]; then echo "bench: failed:$$failed" >&2; exit 1; fi

clean:  ## remove .venv and caches
	rm -rf "$(VENV)" .ruff_cache .mypy_cache .pytest_cache .hypothesis

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16
