# `make train` and `make test` need only Python 3.11 and access to PyPI. They create the virtual
# environment .venv, install Tekso in it, and run. The installation is reused until setup.py or
# pyproject.toml changes.
#
#   make train MODEL=lm.python_source.Small          another experiment
#   make train ARGS='--steps=500'                    more arguments for tekso-trainer
#   make train LOGDIR=runs/NAME                      resumes the run in that folder
#   make test  ARGS='-k params'                      arguments for pytest
#   make test  PROCESSES=4                           number of test processes; each needs up to 4 GB
#   make lint                                        checks style, format, types and imports
#   make test-all                                    test, lint and the slow tests, as CI does
#   make test-matrix                                 every experiment under every execution
#   make benchmarks                                  compares the speed with other frameworks
#   make catalogue                                   writes docs/catalogue.md, tests/params/stored
#   make pictures                                    draws docs/pictures; of runs with ARGS=RUN,
#                                                    of TensorBoard with ARGS=--tensorboard
#   make docs                                        builds the documentation as a site in site/
#   make clean                                       removes .venv; to install it again with:
#   make test PYTHON=/opt/python3.11/bin/python3.11  another interpreter
#   make test TENSORFLOW=tensorflow==2.21.0          another TensorFlow package

VENV = .venv
MODEL = lm.python_source.Tiny
# Each run has a new folder. To resume an interrupted run, set LOGDIR=<its folder>.
LOGDIR = runs/$(MODEL)/$(shell date +%Y-%m-%d_%H-%M-%S)
ARGS =
# Number of test processes that run in parallel.
PROCESSES = 2
# CPU time budget of the tests, in minutes. The tests report if they use more.
QUICK_MINUTES = 12
SLOW_MINUTES = 28
# What lint reads: Tekso's own folders, not those that a user adds to the checkout.
SOURCES = framework models tasks params tools tests docs benchmarks conftest.py setup.py
PYTHON =
TENSORFLOW =

# Let Python and pytest write compiled files, or each test process would compile everything again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help train test lint test-slow test-matrix test-all install benchmarks catalogue pictures docs clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

train: $(VENV)/.installed
	$(VENV)/bin/tekso-trainer --model=$(MODEL) --logdir=$(LOGDIR) $(ARGS)

# One process runs all tests of a file, so that module-scoped fixtures train only once.
PYTEST = $(VENV)/bin/pytest --numprocesses=$(PROCESSES) --dist=loadfile --no-loadscope-reorder
# ARGS may select only quick or only slow tests. pytest exits with 5 if it finds no tests.
NOTHING_IS_FINE = $(if $(ARGS),|| [ $$? = 5 ])

test: $(VENV)/.installed
	$(PYTEST) -m "not slow" --cpu-minutes=$(QUICK_MINUTES) $(ARGS) $(NOTHING_IS_FINE)

test-slow: $(VENV)/.installed
	$(PYTEST) -m slow --cpu-minutes=$(SLOW_MINUTES) $(ARGS) $(NOTHING_IS_FINE)

test-matrix: $(VENV)/.installed
	$(PYTEST) -m matrix $(ARGS)

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check $(SOURCES)
	$(VENV)/bin/ruff format --check $(SOURCES)
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

# Runs one after the other and stops at the first failure.
test-all: $(VENV)/.installed
	@$(MAKE) test
	@$(MAKE) lint
	@$(MAKE) test-slow

install: $(VENV)/.installed

$(VENV)/.installed: setup.py pyproject.toml
	@.ci/install "$(VENV)" "$(PYTHON)" "$(TENSORFLOW)"
	@touch $@

benchmarks: $(VENV)/.installed
	$(VENV)/bin/python -m benchmarks.run $(ARGS)

catalogue: $(VENV)/.installed
	@page=$$($(VENV)/bin/python -m tekso.tools.catalogue) && printf '%s\n' "$$page" > docs/catalogue.md
	@$(VENV)/bin/python -m tekso.tools.catalogue --experiments=tests/params/stored

pictures: $(VENV)/.installed
	@$(VENV)/bin/python -m tekso.tools.pictures docs/pictures $(ARGS)

docs: $(VENV)/.installed
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict
	@echo "The site is in site/. Its search needs a server, such as:"
	@echo "  python3 -m http.server -d site --bind 127.0.0.1   # http://127.0.0.1:8000"

clean:
	rm -rf $(VENV)
