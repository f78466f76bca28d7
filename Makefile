# Each target sets up what it needs in .venv: `make train` on a fresh clone is enough.
#   make train ARGS="--steps 50"        another Python: make PYTHON=python3.12 ...

PYTHON ?= python3
ARGS ?=

# Relative paths only, so that the folder of the clone may have any name.
BIN := .venv/bin
READY := .venv/ready
PACKAGES := schedules partition comm pipe viz cli experiments integrations

.DEFAULT_GOAL := help
# The tests start hundreds of processes: where no bytecode may be written, each of them would compile this package again,
# and each worker the tests.
PYTEST := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/pytest
# Tests that start gloo processes wait for each other more than they compute, and in-process tests never wait: together,
# three for two cores, up to eight. Those of the nightly run that judge times have the machine more for themselves.
THREE_FOR_TWO_CORES := -n $$(((3 * $$(getconf _NPROCESSORS_ONLN) + 1) / 2)) --maxprocesses 8 --dist worksteal
ON_ALL_CORES := -n auto --maxprocesses 8 --dist worksteal
TWO_AT_A_TIME := -n 2 --dist worksteal
# Where ARGS names files that have no such test, that is no mistake (pytest's exit status 5).
OR_NONE := || [ $$? -eq 5 ]

.PHONY: help setup train test test-all nightly tiers gpu extras check lint types bench docs release format clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

setup: $(READY)  ## create .venv with the tested versions (each target does so by itself)

train: $(READY)  ## train a small GPT through a two-rank pipeline; ARGS="..." passes options
	$(BIN)/stagewright train $(ARGS)

test: $(READY)  ## run the first tier: every behaviour once, at most 5 minutes; ARGS="..." passes pytest's options
	$(PYTEST) $(THREE_FOR_TWO_CORES) -m 'not thorough and not nightly' $(ARGS) $(OR_NONE)

test-all: $(READY)  ## run every case, at most 25 minutes; ARGS="..." passes pytest's options
	$(PYTEST) $(THREE_FOR_TWO_CORES) -m 'not nightly' $(ARGS) $(OR_NONE)

extras: .venv/extras  ## install what only some tests use: transformers, accelerate, lightning, torchvision, submitit, ortools, mkdocs, a driver for Chromium

nightly: $(READY)  ## run the seeded faults, full grids, fuzz campaigns and kills; ARGS="..." passes pytest's options
	$(PYTEST) $(ON_ALL_CORES) -m 'nightly and not gloo' $(ARGS) $(OR_NONE)
	$(PYTEST) $(TWO_AT_A_TIME) -m 'nightly and gloo' $(ARGS) $(OR_NONE)

tiers: .venv/extras  ## measure every case, try the seeded faults, and mark what `make test` leaves out (an hour or two)
	rm -rf build/tiers && mkdir -p build/tiers
	STAGEWRIGHT_TIERS=$(CURDIR)/build/tiers PYTHONPATH=$(CURDIR)/tests:$(CURDIR)/tests/tiers/site \
		$(PYTEST) $(THREE_FOR_TWO_CORES) -p tiers.recorder -m 'not nightly'
	PYTHONPATH=tests $(BIN)/python -m tiers build/tiers
	$(BIN)/ruff check --quiet --select I --fix tests
	$(BIN)/ruff format --quiet tests

gpu: $(READY)  ## run what a device must show on one CUDA device; figures go to experiments/results/gpu
	rm -f experiments/results/gpu/figures.jsonl
	STAGEWRIGHT_DEVICE=$${STAGEWRIGHT_DEVICE:-cuda} STAGEWRIGHT_REPORT=experiments/results/gpu $(PYTEST) -n 0 -m gpu -s tests/gpu $(ARGS)

check: lint  ## format, lint, types and the first tier's tests in one process
	$(PYTEST) $(ON_ALL_CORES) -m 'not thorough and not gloo and not nightly' $(ARGS)

lint: $(READY)  ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(MAKE) --no-print-directory types

types: $(READY)  ## mypy in strict mode
	MYPYPATH=.venv/link $(BIN)/mypy -m stagewright -m stagewright.__main__ $(PACKAGES:%=-p stagewright.%)

bench: $(READY)  ## measure this runtime beside torch.distributed.pipelining; ARGS="..." passes options
	$(BIN)/stagewright bench $(ARGS)

release: $(READY)  ## build dist/, and check both files: as a package index would, installed alone, and by the tests in them
	rm -rf dist build/check
	$(BIN)/python -m pip install -qq -c constraints.txt build twine
	$(BIN)/python -m build --outdir dist > /dev/null
	$(BIN)/twine check --strict dist/*
	mkdir -p build/check/link
	$(BIN)/python -m pip install -qq --no-deps --target build/check/wheel dist/*.whl
	cd build && PYTHONPATH=check/wheel ../$(BIN)/python -m stagewright schedule 1f1b --ranks 2 --microbatches 4
	tar xzf dist/*.tar.gz -C build/check && ln -s ../stagewright-$$(PYTHONPATH=build/check/wheel $(BIN)/python -c 'import stagewright; print(stagewright.__version__)') build/check/link/stagewright
	cd build/check/link/stagewright && PYTHONPATH=$(CURDIR)/build/check/link $(CURDIR)/$(BIN)/pytest -q -n auto -p no:cacheprovider -m 'not thorough and not gloo and not nightly' tests/schedules tests/gpu

docs: .venv/docs  ## build the pages as a site, build/site/index.html; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet $(ARGS)

format: $(READY)  ## format the code and fix what ruff can fix
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

clean:  ## remove .venv, caches and build products (runs/ stays)
	rm -rf .venv build dist stagewright.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first, by its exact version: pip then finds a local wheel if there is one. The link gives mypy the
# package under its own name, which the folder of the clone need not have.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(sys.version_info < (3, 11) and f"stagewright needs Python 3.11 or newer, $(PYTHON) is {v}: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -qq -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install -qq -c constraints.txt -e '.[dev]'
	mkdir -p .venv/link
	ln -sfn ../.. .venv/link/stagewright
	@touch $@

# torchvision stands in a folder of its own, where only the tests look: PyPI's wheel is built for CUDA, and beside a CPU
# build of torch its import fails unless two operators are declared first.
.venv/extras: $(READY)
	$(BIN)/python -m pip install -qq -c constraints.txt -e '.[models,integrations,lightning,slurm,browser,solvers,docs]'
	$(BIN)/python -m pip install -qq --no-deps --upgrade --target .venv/torchvision "$$(grep '^torchvision==' constraints.txt)"
	@touch $@

.venv/docs: $(READY)
	$(BIN)/python -m pip install -qq -c constraints.txt -e '.[docs]'
	@touch $@
