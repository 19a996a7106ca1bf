# `make plan` and `make test` are all a newcomer needs. An installation is stamped, so that a second run starts at once.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
LIGHT := $(VENV)/.light
DEV := $(VENV)/.dev
WHAT ?= llama-3.1-70b 8x8xh100-sxm

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help plan lesson lint test test-all bench calibrate wheel clean

help: ## these lines
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

plan: $(LIGHT) ## install nanum into .venv and plan a model on a cluster: make plan WHAT="llama-3.1-8b 1x8xh100-sxm"
	@$(BIN)/nanum plan $(WHAT)

lesson: $(DEV) ## the lesson, with its measured parts
	@$(BIN)/python NN_35_parallelism.py

lint: $(DEV) ## style, types, and who may import whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# A file's tests stay on one worker (loadfile): what they share, real runs above all, is then made once. Groups of tests
# (loadgroup) are not kept together by pytest-xdist 3.8 under pytest 9.2.
test: lint ## everything that takes minutes
	$(BIN)/pytest -q -n auto --dist loadfile -m "not slow"

test-all: lint ## and what takes longer
	$(BIN)/pytest -q -n auto --dist loadfile

bench: $(DEV) ## how fast the readers are, a plan from a cold start, and predicted beside measured steps (minutes)
	@$(BIN)/python -m bench

calibrate: $(DEV) ## fit the coefficients of step times on the published runs again (minutes); writes data/measured/fitted.toml and spread.toml
	@$(BIN)/python -m bench calibrate

wheel: $(LIGHT) ## build dist/nanum-*.whl
	@$(PIP) wheel -q --no-deps -w dist .

clean: ## remove what make made
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -m venv $(VENV)

$(LIGHT): pyproject.toml | $(BIN)/python
	@echo "installing nanum into $(VENV)" >&2
	@$(PIP) install -q -e .
	@$(BIN)/python -m compileall -q src/nanum
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing nanum with its dev and torch extras into $(VENV) (torch is large: minutes)" >&2
	@$(PIP) install -q -c constraints.txt -e '.[dev,torch]'
	@$(BIN)/python -m compileall -q src/nanum
	@touch $@ $(LIGHT)
