# `make train` and `make test` do the whole job on a machine with Python 3.11 and PyPI: each makes
# the virtual environment .venv, installs Tekso into it, and runs. The second time, what is
# installed stays, until setup.py or pyproject.toml change.
#
#   make train MODEL=lm.python_source.Small          another experiment
#   make train ARGS='--set run.steps=500'            more arguments for tekso-trainer
#   make train LOGDIR=runs/NAME                      goes on with the run in that folder
#   make test  ARGS='-k params'                      arguments for pytest
#   make test  PROCESSES=4                           tests side by side; each needs up to 4 GB
#   make lint                                        style, format, types, direction of imports
#   make test-all                                    test, lint, and the slow tests: what CI runs
#   make catalogue                                   writes docs/catalogue.md
#   make clean                                       removes .venv; then also:
#   make test PYTHON=/opt/python3.11/bin/python3.11  another interpreter
#   make test TENSORFLOW=tensorflow==2.21.0          another distribution of TensorFlow

VENV = .venv
MODEL = lm.python_source.Tiny
# A folder of its own for each run; a run that was stopped goes on with LOGDIR=<its folder>.
LOGDIR = runs/$(MODEL)/$(shell date +%Y-%m-%d_%H-%M-%S)
ARGS =
# Tests that run side by side.
PROCESSES = 2
# CPU time that the tests may use: more is a failure, so that they stay cheap enough to be run.
QUICK_MINUTES = 10
SLOW_MINUTES = 30
# What lint reads: the rooms, not what a user adds beside them.
SOURCES = framework models tasks params tools tests docs conftest.py setup.py
PYTHON =
TENSORFLOW =

# Python and pytest keep what they compile: every process of the tests would compile it again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help train test lint test-slow test-all install catalogue clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

train: $(VENV)/.installed
	$(VENV)/bin/tekso-trainer --model=$(MODEL) --logdir=$(LOGDIR) $(ARGS)

# A file is tested by one process: what is trained once for a file is not trained twice.
PYTEST = $(VENV)/bin/pytest --numprocesses=$(PROCESSES) --dist=loadfile --no-loadscope-reorder
# What ARGS select may be in one of the two parts alone: pytest's exit code for no tests is 5.
NOTHING_IS_FINE = $(if $(ARGS),|| [ $$? = 5 ])

test: $(VENV)/.installed
	$(PYTEST) -m "not slow" --cpu-minutes=$(QUICK_MINUTES) $(ARGS) $(NOTHING_IS_FINE)

test-slow: $(VENV)/.installed
	$(PYTEST) -m slow --cpu-minutes=$(SLOW_MINUTES) $(ARGS) $(NOTHING_IS_FINE)

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check $(SOURCES)
	$(VENV)/bin/ruff format --check $(SOURCES)
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

# One after the other, and no further where one fails.
test-all: $(VENV)/.installed
	@$(MAKE) test
	@$(MAKE) lint
	@$(MAKE) test-slow

install: $(VENV)/.installed

$(VENV)/.installed: setup.py pyproject.toml
	@.ci/install "$(VENV)" "$(PYTHON)" "$(TENSORFLOW)"
	@touch $@

catalogue: $(VENV)/.installed
	@$(VENV)/bin/python -m tekso.tools.catalogue > docs/catalogue.md

clean:
	rm -rf $(VENV)
