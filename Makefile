# make train   set up and fine-tune π0.5 on bundled robot data, a few minutes on two cores
# make test    set up and run all tests
# make lint    ruff
# make docs    write docs/flags.md from the code
# make clean   remove the virtual environment and build leftovers
#
# ARGS goes to the command: make train ARGS="--train-iters 50 --dataset-path /data/mine"
# PYTHON chooses the interpreter that .venv is made with: make train PYTHON=python3.12

SHELL := /bin/bash
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
JOBS ?= 2
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	"$$p" -c '$(NEW_ENOUGH)' >/dev/null 2>&1 && echo $$p && break; done)
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
SETUP := pyproject.toml setup.py constraints.txt

.PHONY: train test lint docs clean

# One compute thread on a CPU: so small a model gains little from more, and loses much where the machine is shared.
train: $(VENV)/.installed
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/forge-run --model pi05 --preset tiny --compile $(ARGS)

test: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) $(ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .

docs: $(VENV)/.installed
	$(BIN)/python docs/generate.py

$(VENV)/.made:
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer was found: install one, or say make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV) || { echo "Could not make $(VENV): on Debian and Ubuntu, apt install python3-venv"; exit 1; }
	@touch $@

$(VENV)/.installed: $(VENV)/.made $(SETUP)
	@echo "Installing into $(VENV) (some minutes the first time)"
	$(PIP) -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.made $(SETUP)
	@echo "Installing into $(VENV) with what the tests need (some minutes the first time)"
	$(PIP) -e '.[test]'
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build *.egg-info
