# `make demo` and `make test` do everything: each creates .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# More options of pytest, such as PYTEST="--vllm-python /path/to/python"
PYTEST ?=

.PHONY: demo test lint clean

demo: $(VENV)/.installed
	$(BIN)/paravt lab demo

test: $(VENV)/.installed-dev
	$(BIN)/pytest -n 2 --dist loadgroup $(PYTEST) tests

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

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
