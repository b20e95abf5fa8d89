# `make demo` and `make test` are for newcomers. All install what they need into .venv first.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PYTEST ?= --quiet --numprocesses 3 --dist worksteal
QUICK ?= --quiet --numprocesses 4 --dist worksteal
WAITING ?= --quiet --numprocesses 6 --dist worksteal
ABREAST := $(MAKE) --no-print-directory --jobs 2 --output-sync=target
PIP    := $(BIN)/pip --disable-pip-version-check --quiet
# Most installed modules are never imported. Python compiles the others at their first import, and keeps them.
INSTALL := $(PIP) install --no-compile
unexport PYTHONDONTWRITEBYTECODE

# Where a driver is, TensorFlow with CUDA; else the build for CPUs, on simulated GPUs.
TENSORFLOW := $(shell test -e /proc/driver/nvidia/version && echo tensorflow || echo cpu-tensorflow)

.DEFAULT_GOAL := help
.PHONY: help collect docs-site demo demo-tensorflow test test-slow test-frameworks test-system test-vm test-slurm test-gpu test-sqlite fuzz unit lint types contracts fmt docs docs-picture docs-check torture torture-slurm chaos bench bench-scheduling size defects check wheel release deb lock clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.demo  ## share two simulated GPUs, queue a job and stop another, in fifteen seconds
	@$(BIN)/python examples/demo.py

demo-tensorflow: $(VENV)/.tensorflow  ## train a network under a 4 GiB lease, and show it
	@$(BIN)/python examples/demo.py tensorflow

test: $(VENV)/.dev  ## run the quick tests, in some minutes
	$(BIN)/python -m pytest -m 'not slow' $(QUICK)

# What mostly waits has a line of its own, with more workers than cores. The longest tests come first.
test-slow: $(VENV)/.tensorflow  ## run the other end-to-end tests, real frameworks, Slurm, the web page and fuzzing
	@PYTHONPATH=tests $(BIN)/python -m frameworks.environments
	$(BIN)/python -m pytest -m 'slow and not more_versions' tests/web tests/component tests/fuzz tests/frameworks $(PYTEST)
	$(BIN)/python -m pytest -m slow tests/e2e tests/slurm $(WAITING)

test-frameworks: $(VENV)/.tensorflow  ## run the tests of frameworks with all of their versions
	@PYTHONPATH=tests $(BIN)/python -m frameworks.environments all
	$(BIN)/python -m pytest tests/frameworks $(PYTEST)

fuzz: $(VENV)/.dev  ## try strange input, fifty times as much as the tests do, for some hours
	GPULEASE_FUZZ=50 $(BIN)/python -m pytest tests/fuzz --quiet --timeout 36000

unit: $(VENV)/.dev  ## run the tests that take milliseconds
	$(BIN)/python -m pytest tests/unit $(PYTEST)

lint: $(VENV)/.dev  ## check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev  ## check types
	$(BIN)/mypy

contracts: $(VENV)/.dev  ## check that imports point down
	$(BIN)/lint-imports

fmt: $(VENV)/.dev  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.dev  ## write the generated pages of docs/
	$(BIN)/python docs/generate.py

docs-picture: $(VENV)/.dev  ## record the sessions that README and docs show (root: USERS='alice bob')
	$(BIN)/python docs/record_session.py $(if $(USERS),--users $(USERS))

docs-site: $(VENV)/.dev  ## build the docs as a site with search, in build/docs-site/html
	@rm -rf build/docs-site && mkdir -p build/docs-site/pages
	@cp -r README.md SECURITY.md CHANGELOG.md CONTRIBUTING.md LICENSE docs examples build/docs-site/pages
	@cp docs/zensical.toml build/docs-site
	@NO_COLOR=1 $(BIN)/zensical build --strict --config-file build/docs-site/zensical.toml

# pytest rewrites each test at its first import: here once, and not in each of its workers.
collect: $(VENV)/.dev
	@$(BIN)/python -m pytest tests --collect-only -qq >/dev/null

docs-check: $(VENV)/.dev
	$(BIN)/python docs/generate.py --check

test-system: $(VENV)/.dev  ## test service and package on a booted Debian (root; RELEASE=13; 12 without)
	GPULEASE_TEST_SYSTEMD=1 GPULEASE_TEST_DEBIAN=$(or $(RELEASE),12) $(BIN)/python -m pytest tests/system --quiet --numprocesses 0

test-vm: $(VENV)/.dev  ## test RAM and cores of jobs in a virtual machine (root; minutes with KVM, an hour without)
	GPULEASE_TEST_VM=1 $(BIN)/python -m pytest tests/vm --quiet --numprocesses 0 -rP

test-slurm: $(VENV)/.dev  ## test under this machine's Slurm and under 24.11 (root; fetches a Debian first)
	$(BIN)/python -m pytest tests/slurm $(PYTEST)
	GPULEASE_TEST_SLURM=24.11 $(BIN)/python -m pytest tests/slurm $(PYTEST)

test-gpu: $(VENV)/.tensorflow  ## test on this machine's GPUs, with the frameworks that are there
	$(BIN)/python -m pytest tests/gpu -rs --capture no --numprocesses 0

test-sqlite: $(VENV)/.dev  ## test the database with Debian 11's SQLite, the oldest that is supported
	.ci/old_sqlite $(BIN)/python

torture: $(VENV)/.dev  ## kill -9 the daemon 200 times and count what was promised (KILLS=, SEED=)
	PYTHONPATH=tests $(BIN)/python -m torture --kills $(or $(KILLS),200) $(if $(SEED),--seed $(SEED))

torture-slurm: $(VENV)/.dev  ## kill the daemons of a Slurm cluster in 20 rounds (root; ROUNDS=, SEED=)
	GPULEASE_SLURM_ROUNDS=$(or $(ROUNDS),20) $(if $(SEED),GPULEASE_SLURM_SEED=$(SEED)) \
	$(BIN)/python -m pytest tests/slurm/test_kills.py --quiet --numprocesses 0 --capture no --timeout 3600

chaos: $(VENV)/.dev  ## run jobs among strangers, failing NVML calls and lost GPUs (ROUNDS=, SEED=)
	PYTHONPATH=tests $(BIN)/python -m chaos --rounds $(or $(ROUNDS),10) $(if $(SEED),--seed $(SEED))

bench: $(VENV)/.dev  ## measure what the project makes claims about
	$(BIN)/python -m benchmarks

size:  ## measure how large the code is, and compare it with its goals
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m benchmarks.size

defects: $(VENV)/.dev  ## make 30 defects in copies of the code, and see which the quick tests find (SEED=)
	$(BIN)/python -m benchmarks.defects $(if $(SEED),--seed $(SEED))

bench-scheduling: $(VENV)/.dev  ## compare the queue with its goals (GPULEASE_TRACES=DIRECTORY)
	$(BIN)/python -m benchmarks.inflation
	$(BIN)/python -m benchmarks.scheduling
	$(BIN)/python -m benchmarks.forecasts

# Each line keeps two cores busy: quick tests wait for disks, system tests for the systemd that they boot as root.
check: $(VENV)/.dev  ## all that continuous integration runs
	@$(ABREAST) collect lint types contracts docs-check docs-site
	@$(MAKE) --no-print-directory test
	@$(ABREAST) test-slow $(if $(filter 0,$(shell id -u)),test-system)

wheel: $(BIN)/python  ## build the package in dist/
	@$(PIP) wheel --no-deps --wheel-dir dist .
	@ls dist/*.whl

release: $(VENV)/.release  ## build the package twice, check it, list its parts (SBOM), and sign a tag if there is a key
	@.ci/release $(BIN)

deb: $(VENV)/.dev  ## build the Debian package, the same bit for bit each time (RELEASE=13; 12 without)
	@.ci/deb $(BIN) $(or $(RELEASE),12)

lock: $(VENV)/.dev  ## write the versions and hashes of the packages that are bundled
	@$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --extra server \
	  --custom-compile-command 'make lock' --upgrade pyproject.toml --output-file .ci/lock.txt

clean:  ## remove what was installed and built here
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/.tensorflow: $(VENV)/.dev
	@echo "installing TensorFlow ($(TENSORFLOW)); this takes a minute the first time"
	@$(INSTALL) --editable '.[$(TENSORFLOW)]'
	@touch $@

$(VENV)/.demo: pyproject.toml $(BIN)/python
	@echo "installing gpulease into $(VENV)"
	@$(INSTALL) --editable '.[daemon]'
	@touch $@

$(VENV)/.dev: pyproject.toml $(BIN)/python
	@echo "installing gpulease and its tools into $(VENV)"
	@$(INSTALL) --editable '.[dev]'
	@touch $@

$(VENV)/.release: pyproject.toml $(BIN)/python
	@$(INSTALL) --editable '.[release]'
	@touch $@

# Debian and Ubuntu keep venv in a package of its own.
# The pip of an older Python takes twice as long to install the same.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "gpulease needs Python 3.11 or later; try: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { \
	  rm -rf $(VENV); \
	  echo "this Python has no venv: installing the package python3-venv"; \
	  as_root=; [ "$$(id -u)" = 0 ] || as_root=sudo; \
	  $$as_root apt-get update -qq && $$as_root apt-get install -qq -y python3-venv >/dev/null \
	    && $(PYTHON) -m venv $(VENV); } || \
	  { echo "cannot make $(VENV); install python3-venv and try again" >&2; exit 1; }
	@$(PIP) install --upgrade pip 2>/dev/null || true
