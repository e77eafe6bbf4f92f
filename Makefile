# The few commands that a contributor needs; `make` lists them.
PYTHON ?= python

.DEFAULT_GOAL := help
.PHONY: help build lint test docs picture bench clean

help: ## list these commands
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile | expand -t 10

# The commands.

build: ## compile what changed
	$(PYTHON) setup.py build_ext --inplace

lint: ## formatting, linters and types
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	cython-lint pyx vpool tests
	$(PYTHON) -m mypy

test: ## all tests that need no GPU, a file a core at a time
	$(PYTHON) -m pytest -n auto --dist loadfile

docs: ## these pages, into docs/_build; every warning is an error
	$(PYTHON) -m sphinx -n -W --keep-going docs docs/_build

picture: ## draw the picture of the README anew
	$(PYTHON) docs/pictures.py

bench: ## what an allocation costs here
	$(PYTHON) -m vpool bench

clean: ## what a build leaves, but for compiled modules
	rm -rf build dist docs/_build docs/_pictures *.egg-info
