# Two commands do the work: `make demo` and `make test`. Both set everything up in .venv first, once.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# One more than cores, because some tests wait for processes, timers and locks.
WORKERS ?= $(shell expr $$(nproc) + 1)
# Debian packages that some tests use. Without them `make test` passes too and lists the tests it skipped.
SYSTEM_PACKAGES := bubblewrap chromium iproute2 jq munge postgresql slurm-wlm

.PHONY: help demo test test-all test-gpu lint bench docs site system-deps clean

help:                ## Show this list
	@grep -E '^[a-z-]+: .*##|^[a-z-]+: +##' $(MAKEFILE_LIST) | sed -E 's/:.*## +/\t/' | expand -t 14

demo: $(READY)       ## Fine-tune a small real model on this machine, before and after measured
	$(BIN)/whet demo

test: $(READY)       ## All tests that need no GPU, in minutes
	$(BIN)/pytest -n $(WORKERS) --dist worksteal

test-all: $(READY)   ## The slow proofs too
	WHET_TEST_ALL=1 $(BIN)/pytest -n $(WORKERS) --dist worksteal

test-gpu:            ## The tests for CUDA, with the Python that is active (a GPU machine brings its own torch)
	$(PYTHON) -m pytest -m gpu -rs

lint: $(READY)       ## Style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)      ## Speed of data preparation and training on this machine, compared with plain loops
	$(BIN)/python bench/data.py
	$(BIN)/python bench/train.py

docs: $(READY)       ## Write the pages that are made from the code
	$(BIN)/python docs/generate.py

site: $(READY)       ## Build the docs site into build/site; it opens without a server and loads nothing from elsewhere
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

system-deps:         ## Install the Debian packages that tests use (needs root)
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(SYSTEM_PACKAGES) > /dev/null

clean:               ## Delete the environment and everything that was built; runs stay
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis dist build

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
