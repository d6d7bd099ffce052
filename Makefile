# perflab's commands. `make` lists them; everything lives in .venv and needs only python3.11 and make.

PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=
NBVAL := --nbval-lax --nbval-current-env --nbval-sanitize-with notebooks/sanitize.cfg --nbval-cell-timeout 300

.DEFAULT_GOAL := help
.PHONY: help install model doctor study study-quick lab test lessons verify sanitize lint format clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## set up .venv with the tested versions

$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard perflab/csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; name one with: make PYTHON=/path/to/python3.11 install"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

model: install ## fetch the embedded model into the user's cache
	$(BIN)/perflab model fetch

doctor: install ## what this machine offers, and what the engine will use
	$(BIN)/perflab doctor $(ARGS)

study: model ## tune the embedded model; ends in one report.html (ARGS="--model DIR" for your own)
	$(BIN)/perflab study $(ARGS)

study-quick: model ## the same in about two minutes
	$(BIN)/perflab study --quick $(ARGS)

lab: model ## open JupyterLab on the notebooks
	$(BIN)/jupyter lab --notebook-dir notebooks --LabApp.news_url=None $(ARGS)

test: install ## the tests, with the first two notebooks
	$(BIN)/python -m pytest $(NBVAL) tests notebooks/00_quickstart.ipynb notebooks/01_where_the_time_goes.ipynb $(ARGS)

lessons: install ## run every notebook from top to bottom
	$(BIN)/python -m pytest $(NBVAL) notebooks $(ARGS)

verify: install ## the long properties and full grids, then the sanitizers (more than an hour)
	$(BIN)/python -m pytest -m verify tests $(ARGS)
	$(MAKE) sanitize

sanitize: install ## the kernels' tests under g++'s address, undefined-behaviour and thread sanitizers
	$(call sanitized,asan,-fsanitize=address$(comma)undefined -fno-sanitize-recover=undefined,ASAN_OPTIONS=detect_leaks=0)
	$(call sanitized,tsan,-fsanitize=thread,TSAN_OPTIONS="halt_on_error=1 ignore_noninstrumented_modules=1")

comma := ,
# $(1): the sanitizer's library, $(2): flags, $(3): its settings. The installed kernels stay as they are.
define sanitized
	PERFLAB_CFLAGS="$(2) -O2 -g1 -w" $(BIN)/python setup.py -q build_ext -f -b build/$(1) -t build/$(1) >/dev/null
	test -f build/$(1)/perflab/_native*.so || { echo "the kernels do not compile with $(2)"; exit 1; }
	$(3) LD_PRELOAD=$$($(CXX) -print-file-name=lib$(1).so) OMP_NUM_THREADS=1 \
	  PERFLAB_NATIVE_LIBRARY=$$(echo build/$(1)/perflab/_native*.so) \
	  $(BIN)/python -m pytest -q --capture=sys tests/test_kernels.py
endef

lint: install ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install ## let ruff sort imports and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove .venv and caches; studies in runs/ stay
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
