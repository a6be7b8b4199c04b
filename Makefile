# Everything is installed into .venv; after that, nothing needs the network.
# PYTHON chooses the interpreter of a new .venv (make PYTHON=python3.12 test), WORKERS the test processes.

.DEFAULT_GOAL := help
SHELL := bash

BIN     := .venv/bin
STAMP   := .venv/.installed
INPUTS  := pyproject.toml constraints.txt
WORKERS ?= 2

# No test and no demo may depend on the network.
OFFLINE := HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1
# One torch thread for each test process: two processes with all cores each slow one another down.
PYTEST  := $(OFFLINE) OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS)

.PHONY: help
help:  ## List the targets
	@grep -hE '^[a-z.-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z.-]+):.*## (.*)/\1|\2/' \
	  | while IFS='|' read -r name text; do printf '  make %-12s %s\n' "$$name" "$$text"; done

.PHONY: install
install: $(STAMP)  ## Install into .venv the versions of constraints.txt (the others do this first)

.PHONY: demo
demo: $(STAMP)  ## See it work, offline
	$(OFFLINE) $(BIN)/hf-retarget demo

.PHONY: test
test: $(STAMP)  ## Run the tests
	$(PYTEST)

.PHONY: test-slow
test-slow: $(STAMP)  ## Run the full sweep over timm, and let every call fail (hours)
	$(PYTEST) -m slow --timeout 3600

.PHONY: check
check: $(STAMP)  ## Check everything: format, lint, types, tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST)

.PHONY: format
format: $(STAMP)  ## Format the code and mend what ruff can mend
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

.PHONY: bench
bench: $(STAMP)  ## Measure how many of timm's models are covered
	$(OFFLINE) $(BIN)/python benchmarks/coverage.py

.PHONY: docs
docs: $(STAMP)  ## Build the pages of docs/ as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# To move to newer versions: .venv/bin/pip install --upgrade --upgrade-strategy eager -e '.[dev,docs]', make check, make constraints.
.PHONY: constraints
constraints: $(STAMP)  ## Write the versions installed in .venv to constraints.txt
	$(BIN)/python -c "$$PINS" > constraints.txt.new
	mv constraints.txt.new constraints.txt
	cksum $(INPUTS) > $(STAMP)

.PHONY: clean
clean:  ## Remove caches and builds (.venv stays)
	rm -rf build dist site .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name .venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp holds the checksums of what was installed: a checkout that only touches these files installs nothing.
$(STAMP): $(INPUTS)
	@set -eu; \
	if cksum $(INPUTS) | cmp -s - $@; then touch $@; exit 0; fi; \
	if [ ! -x $(BIN)/python ]; then \
	  for python in $${PYTHON:-python3.11 python3 python3.13 python3.12 python3.10}; do \
	    "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || continue; \
	    echo "Making .venv with $$("$$python" --version)"; \
	    "$$python" -m venv .venv || { rm -rf .venv; exit 1; }; \
	    break; \
	  done; \
	fi; \
	if [ ! -x $(BIN)/python ]; then \
	  echo "hf-retarget needs Python 3.10 or newer, and '$${PYTHON:-python3}' is missing or older." \
	    "Install one, or say where it is: make install PYTHON=/path/to/python" >&2; \
	  exit 1; \
	fi; \
	echo "Installing into .venv (on Linux torch brings its CUDA packages: about 6 GB, a few minutes)"; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs]'; \
	cksum $(INPUTS) > $@

define PINS
import re, sys
from importlib.metadata import distributions
from packaging.specifiers import SpecifierSet

installed = {d.name: d for d in distributions()}
minors = range(sys.version_info.minor + 1)

def first(name):  # the oldest minor version of Python 3 that a release accepts
    accepts = SpecifierSet(installed[name].metadata["Requires-Python"] or "")
    return next(minor for minor in minors if f"3.{minor}.99" in accepts)

print(f"# The exact versions hf-retarget was tested with, on Python 3.{minors[-1]}: pip install -c constraints.txt -e '.[dev,docs]'")
print("# Written by 'make constraints' from what .venv holds. A release that needs a newer Python than we do is pinned for those")
print("# Pythons only; the older ones take the newest that pyproject.toml allows. CUDA packages and triton are left to torch.")
for name in sorted(installed, key=str.lower):
    if not re.match("(pip|hf-retarget|triton|(nvidia|cuda)-.*)$$", name):
        marker = f'; python_version >= "3.{first(name)}"' if first(name) > first("hf-retarget") else ""
        print(name + "==" + installed[name].version.split("+")[0] + marker)
endef
export PINS
