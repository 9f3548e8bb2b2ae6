# make check: before a commit, two minutes. make test: everything. Each makes the virtual environment when it must.
SHELL := /bin/bash
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
ARGS ?=
SEED ?=
WORKERS ?= 2
OWN := tests/unit/core tests/unit/wire tests/property tests/golden
# The tests start hundreds of processes: each would compile kvlog again.
unexport PYTHONDONTWRITEBYTECODE
QUICK := not kafka and not gpu and not e2e and not slow and not model and not vllm

.PHONY: help venv venv-vllm lint check cover test test-gpu test-vllm demo bench sim soak fmt clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -E '^[a-z-]+:.* ## ' $(MAKEFILE_LIST) | sed -E 's/:.* ## /\t/' | expand -t 12
$(STAMP): pyproject.toml constraints.txt .ci/venv ; @.ci/venv $(VENV)
venv: $(STAMP) ## the virtual environment, with the pinned versions
lint: $(STAMP) ## ruff and mypy
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
check: lint ## lint, and every test that needs no broker, engine or model (two minutes)
	@$(BIN)/pytest -q -n $(WORKERS) -m "$(QUICK)" $(ARGS)
cover: $(STAMP) ## branch coverage of kvlog/core and kvlog/wire by their own tests: must be 100 %
	@$(BIN)/pytest -q -n $(WORKERS) --durations=15 --cov --cov-report=term-missing $(OWN)
test: lint cover ## everything but vLLM, each test once; tests that lack a broker or a device skip and say so
	@$(BIN)/pytest -q -n $(WORKERS) --dist worksteal --durations=25 $(OWN:%=--ignore=%) --ignore=tests/vllm $(ARGS)
test-gpu: $(STAMP) ## the tests that need a CUDA device
	@$(BIN)/pytest -m gpu $(ARGS)
venv-vllm: ## the virtual environment of the vLLM tests (3.5 GB); says so where there is no wheel
	@.ci/venv-vllm .venv-vllm
test-vllm: $(STAMP) $(if $(KVLOG_VLLM_PYTHON),,venv-vllm) ## the tests that start real vLLM servers; ARGS="-m vllm_ci": CI's
	@$(BIN)/pytest -m vllm -n 0 -p no:randomly --durations=0 tests/vllm $(ARGS)
demo: $(STAMP) ## an answer that survives kill -9 (ARGS=--help for more)
	@$(BIN)/kvlog demo $(ARGS)
bench: $(STAMP) ## the benchmarks
	@$(BIN)/python -m tests.bench $(ARGS)
sim: $(STAMP) ## simulated nodes until 100,000 faults were injected, or one run again (SEED=)
	@$(BIN)/python -m tests.sim $(if $(SEED),--seed $(SEED)) $(ARGS)
soak: $(STAMP) ## daemons, engines and faults for as long as ARGS say
	@$(BIN)/python -m tests.bench.soak $(ARGS)
fmt: $(STAMP) ## format, and fix what ruff can fix
	@$(BIN)/ruff check --fix-only -q . ; $(BIN)/ruff format .
clean: ## remove the virtual environment and every cache
	@rm -rf $(VENV) build dist .run .coverage htmlcov .hypothesis .mypy_cache .pytest_cache .ruff_cache *.egg-info
