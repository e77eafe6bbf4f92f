# The few commands that a contributor needs; `make` lists them.
PYTHON ?= python

.DEFAULT_GOAL := help
.PHONY: help build lint test coverage docs picture bench clean

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

# Compiled modules of its own, which count the lines of the .pyx and .pxd files that run, also those without the GIL.
COVERED = $(CURDIR)/build/coverage
coverage: ## lines that the tests run, Python and Cython; fails below 95 %
	VPOOL_COVERAGE=1 $(PYTHON) setup.py -q build --build-base build/coverage --build-lib $(COVERED)/lib
	find $(COVERED) -name '*.gcda' -delete
	$(PYTHON) -m coverage erase
	-PYTHONSAFEPATH=1 PYTHONPATH=$(COVERED)/lib:$(CURDIR) \
		$(PYTHON) -m coverage run -m pytest -n auto --dist loadfile $(TESTS)
	$(PYTHON) -m coverage combine -q
	$(PYTHON) -m coverage report --skip-covered; python=$$?; \
		$(PYTHON) -m gcovr --fail-under-line 95 $(COVERED) && exit $$python

docs: ## these pages, into docs/_build; every warning is an error
	$(PYTHON) -m sphinx -n -W --keep-going docs docs/_build

picture: ## draw the picture of the README anew
	$(PYTHON) docs/pictures.py

bench: ## what an allocation costs here
	$(PYTHON) -m vpool bench

clean: ## what a build leaves, but for compiled modules
	rm -rf build dist docs/_build docs/_pictures *.egg-info
