# `make train` and `make test` do the whole job on a machine with Python 3.11 and PyPI: each makes
# the virtual environment .venv, installs Tekso into it, and runs. The second time, what is
# installed stays, until setup.py or pyproject.toml change.
#
#   make train MODEL=lm.python_source.Small          another experiment
#   make train ARGS='--set run.steps=500'            more arguments for tekso-trainer
#   make train LOGDIR=runs/NAME                      goes on with the run in that folder
#   make test  ARGS='-k params'                      arguments for pytest
#   make test  PROCESSES=4                           tests side by side; each needs 4 GB
#   make clean                                       removes .venv; then also:
#   make test PYTHON=/opt/python3.11/bin/python3.11  another interpreter
#   make test TENSORFLOW=tensorflow==2.20.0          another TensorFlow

VENV = .venv
MODEL = lm.python_source.Tiny
# A folder of its own for each run; a run that was stopped goes on with LOGDIR=<its folder>.
LOGDIR = runs/$(MODEL)/$(shell date +%Y-%m-%d_%H-%M-%S)
ARGS =
# Tests that run side by side.
PROCESSES = 2
PYTHON =
TENSORFLOW =

.PHONY: help train test install clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

train: $(VENV)/.installed
	$(VENV)/bin/tekso-trainer --model=$(MODEL) --logdir=$(LOGDIR) $(ARGS)

test: $(VENV)/.installed
	$(VENV)/bin/pytest --numprocesses=$(PROCESSES) --dist=worksteal $(ARGS)

install: $(VENV)/.installed

$(VENV)/.installed: setup.py pyproject.toml
	@.ci/install "$(VENV)" "$(PYTHON)" "$(TENSORFLOW)"
	@touch $@

clean:
	rm -rf $(VENV)
