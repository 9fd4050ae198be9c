# `make demo` and `make test` do everything: each creates .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# More options of pytest, such as PYTEST="--vllm-python /path/to/python"
PYTEST ?=

.PHONY: demo test lint pages clean

demo: $(VENV)/.installed
	$(BIN)/paravt lab demo

test: $(VENV)/.installed-dev
	$(BIN)/pytest -n 2 --dist loadfile $(PYTEST) tests

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The pages' scripts and styles, from web/ to paravt/report/assets, which are kept in git: only a change of web/ needs it.
pages:
	cd web && npm ci && npm run build

$(VENV)/bin/pip:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/pip
	$(BIN)/pip install --quiet -e .
	touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/bin/pip
	$(BIN)/pip install --quiet -e '.[dev]'
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV)
