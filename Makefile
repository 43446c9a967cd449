# `make demo` and `make test` need Python 3.10 to 3.14 with venv, and a C++17 compiler. All else, cmake and ninja
# included, goes into .venv from constraints.txt; a second run starts at once. `make help` lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
# Says what it downloads, with its size, and what it builds.
SHOWN_PIP := $(BIN)/python -m pip --disable-pip-version-check --no-color
SHOWN := grep --line-buffered -E '^ *(Downloading|Using cached|Building|Preparing editable|Installing|ERROR)|running|^error'
BUILD_TOOLS := scikit-build-core pybind11 cmake ninja
# A version for which there is a tests/sglang/requirements-VERSION.txt.
SGLANG ?= 0.5.17
SGLANG_VENV := build/sglang-$(SGLANG)
VLLM ?= 0.33.0
VLLM_VENV := build/vllm-$(VLLM)
TOKENSPEED_VENV := build/tokenspeed
RAY_VENV := build/ray
# Else each program that the tests start compiles torch's modules again.
unexport PYTHONDONTWRITEBYTECODE
NATIVE := $(shell find csrc -name '*.cpp' -o -name '*.hpp' 2>/dev/null)

LINTS := ruff clang-format mypy imports includes sizes words locks generated workflows

.PHONY: help demo test test-long test-ray test-sglang test-tokenspeed test-vllm tests sanitize soak fuzz lint $(LINTS:%=lint-%) format \
  site wheel-check ready clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY)  ## start an engine, release its memory, resume it, compare the tokens; ends by itself
	@$(BIN)/memsaver demo $(ARGS)

test: $(READY)  ## lint, type-check and run every test (those that need a GPU are skipped without one)
	@if [ -e /dev/nvidiactl ]; then for each in tests/devices tests/native tests/reliability tests/gpu/test_*.py; do \
	  $(BIN)/python -m pytest -m gpu $$each $(ARGS) || [ $$? -eq 5 ]; done; fi
	@$(MAKE) --no-print-directory -j3 tests $(LINTS:%=lint-%)

# Several processes at once: `python -m tests.run tests/unit -k region` runs a part of it.
tests: $(READY)
	@$(BIN)/python -m tests.run $(ARGS)

test-long: $(READY)  ## what is long by nature: random programs, every failing call, every kill, soak, fuzz (an hour)
	TESTS_LONG=1 $(BIN)/python -m tests.run -m "long and not gpu" $(ARGS)
	$(MAKE) --no-print-directory soak

test-sglang: $(SGLANG_VENV)/.ready  ## tests against real SGLang on the CPU; SGLANG=0.5.23 chooses its version (minutes)
	OMP_NUM_THREADS=1 MEMSAVER_DRIVER=host $(SGLANG_VENV)/bin/python -m pytest -p no:cacheprovider tests/sglang $(ARGS)

$(SGLANG_VENV)/.ready: tests/sglang/set_up tests/sglang/requirements.txt tests/sglang/requirements-$(SGLANG).txt | $(READY)
	@echo 'Setting up $(SGLANG_VENV) ...'
	@mkdir -p build
	@tests/sglang/set_up $(VENV) $(SGLANG_VENV) $(SGLANG)

test-vllm: $(VLLM_VENV)/.ready  ## tests against real vLLM's scheduler and front end on the CPU; VLLM=0.26.0 chooses its version
	OMP_NUM_THREADS=1 MEMSAVER_DRIVER=host $(VLLM_VENV)/bin/python -m pytest -p no:cacheprovider tests/vllm $(ARGS)

$(VLLM_VENV)/.ready: tests/vllm/requirements.txt | $(READY)
	@echo 'Setting up $(VLLM_VENV) ...'
	@rm -rf $(VLLM_VENV)
	@$(BIN)/python -m venv --without-pip $(VLLM_VENV)
	@echo "import site; site.addsitedir('$$(echo $(CURDIR)/$(VENV)/lib/python*/site-packages)')" > $$(echo $(VLLM_VENV)/lib/python*/site-packages)/memsaver.pth
	@$(BIN)/python -m pip --disable-pip-version-check --python $(VLLM_VENV)/bin/python install -qq --no-deps --no-compile vllm==$(VLLM) -r tests/vllm/requirements.txt
	@touch $@

test-tokenspeed: $(TOKENSPEED_VENV)/.ready  ## tests against real tokenspeed without its kernels (minutes)
	OMP_NUM_THREADS=1 MEMSAVER_DRIVER=host $(TOKENSPEED_VENV)/bin/python -m pytest -p no:cacheprovider tests/tokenspeed $(ARGS)

$(TOKENSPEED_VENV)/.ready: tests/tokenspeed/set_up tests/tokenspeed/requirements.txt | $(READY)
	@echo 'Setting up $(TOKENSPEED_VENV) ...'
	@mkdir -p build
	@tests/tokenspeed/set_up $(VENV) $(TOKENSPEED_VENV)

test-ray: $(RAY_VENV)/.ready  ## a fleet on a Ray cluster of simulated nodes, Ray Serve LLM's calls, and the example (minutes)
	$(RAY_VENV)/bin/python -m pytest -p no:cacheprovider tests/fleet_on_ray $(ARGS)
	MEMSAVER_DRIVER=host $(RAY_VENV)/bin/python examples/fleet_on_ray.py --rounds 12

# An environment of its own over .venv: with FastAPI 0.137 or newer, Ray Serve 2.60 answers 400 to every call of its ingress.
$(RAY_VENV)/.ready: constraints.txt | $(READY)
	@echo 'Setting up $(RAY_VENV) ...'
	@rm -rf $(RAY_VENV)
	@$(BIN)/python -m venv --without-pip $(RAY_VENV)
	@echo "import site; site.addsitedir('$$(echo $(CURDIR)/$(VENV)/lib/python*/site-packages)')" \
	  > $$(echo $(RAY_VENV)/lib/python*/site-packages)/memsaver.pth
	@$(PIP) --python $(RAY_VENV)/bin/python install -c constraints.txt 'ray[serve]' pyarrow python-multipart
	@$(PIP) --python $(RAY_VENV)/bin/python install --no-deps fastapi==0.136.3
	@touch $@

sanitize: $(READY)  ## the native tests under address, leak, undefined-behaviour and thread sanitizers (minutes)
	PATH="$(CURDIR)/$(BIN):$$PATH" PYTHON=$(BIN)/python tests/reliability/sanitize.sh

soak: $(READY)  ## 1,000 cycles of a served engine under load, with a co-tenant; prints what grows (minutes)
	$(BIN)/python benchmarks/soak.py $(ARGS)

fuzz: $(READY)  ## requests that nobody would write, for as long as ARGS='--seconds N' says (a minute)
	MEMSAVER_DRIVER=host $(BIN)/python -m tests.reliability.fuzz $(ARGS)

lint: $(READY)  ## format, types, dependency arrows, sizes, words, lock rules, generated files, workflows; changes nothing
	@$(MAKE) --no-print-directory -j4 $(LINTS:%=lint-%)

lint-ruff: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint-mypy: $(READY)
	$(BIN)/mypy

lint-imports: $(READY)
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/python .ci/check_imports.py

lint-includes lint-sizes lint-words: lint-%: $(READY)
	$(BIN)/python .ci/check_$*.py

lint-generated: $(READY)
	$(BIN)/python .ci/generate.py --check

lint-workflows: $(READY)
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml

# The tools without a cache of their own read csrc alone.
lint-clang-format lint-locks: lint-%: build/lint/% ;

build/lint/clang-format: $(NATIVE) .clang-format | $(READY)
	@echo clang-format
	@$(BIN)/clang-format --dry-run -Werror $(NATIVE)
	@mkdir -p $(@D) && touch $@

build/lint/locks: $(NATIVE) .ci/check_locks.py | $(READY)
	$(BIN)/python .ci/check_locks.py
	@mkdir -p $(@D) && touch $@

format: $(READY)  ## format Python and C++ in place
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE)

site: $(READY)  ## the documentation site, in build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --config-file docs/site/mkdocs.yml

wheel-check:  ## build sdist and wheels, install them in empty environments elsewhere, run doctor and demo (minutes)
	.ci/check_wheel $(PYTHONS)

ready: $(READY)  ## set up .venv and build the native module, no more

clean:  ## remove .venv, the build folder and the caches
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find memsaver_core -name '*.so' -delete

$(BIN)/python:
	@"$(PYTHON)" -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v < (3, 15) else \
	  f"memsaver needs Python 3.10 to 3.14, $(PYTHON) is {v[0]}.{v[1]}: make PYTHON=python3.11 ...")'
	@"$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); \
	  echo 'This Python has no venv module; on Debian and Ubuntu: apt install python3-venv' >&2; exit 1; }

# Built without isolation: the build tools come from the same pinned .venv, and the build never fetches a torch of its own.
$(READY): constraints.txt pyproject.toml CMakeLists.txt $(NATIVE) | $(BIN)/python
	@command -v "$${CXX:-c++}" >/dev/null || { \
	  echo 'A C++17 compiler is needed; on Debian and Ubuntu: apt install g++' >&2; exit 1; }
	@echo 'Setting up $(VENV) (some minutes the first time; torch is the largest download) ...'
	@echo '1 of 2: the tools of the build'
	@$(SHOWN_PIP) install --no-compile -c constraints.txt $(BUILD_TOOLS) | $(SHOWN) || [ $${PIPESTATUS[0]} -eq 0 ]
	@echo '2 of 2: memsaver, which is compiled meanwhile, and what it and its tests need'
	@{ PATH="$(CURDIR)/$(BIN):$$PATH" $(SHOWN_PIP) install --no-compile --no-deps --no-build-isolation -e . | $(SHOWN) \
	    || [ $${PIPESTATUS[0]} -eq 0 ]; } & \
	  { $(SHOWN_PIP) install --no-compile -c constraints.txt torch transformers | $(SHOWN) || [ $${PIPESTATUS[0]} -eq 0 ]; }; \
	  wait $$!
	@$(SHOWN_PIP) install --no-compile -c constraints.txt 'memsaver[test,lint,docs]' | $(SHOWN) || [ $${PIPESTATUS[0]} -eq 0 ]
	@touch $@
