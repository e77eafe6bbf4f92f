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

# A copy of the checkout, whose compiled modules count the lines of the .pyx and .pxd files that run, also those without
# the GIL.  Tests that fail there, say for want of time, do not end it: they are for `make test`.
COVERED = $(CURDIR)/build/coverage
coverage: ## lines that the tests run, Python and Cython; fails below 95 %
	mkdir -p $(COVERED)
	cd $(COVERED) && rm -rf docs pyx tests vpool
	tar -c --exclude=./.git --exclude=./.venv --exclude=./build --exclude='*.so' --exclude=__pycache__ . | tar -x -C $(COVERED)
	cd $(COVERED) && VPOOL_COVERAGE=1 $(PYTHON) setup.py -q build_ext --inplace
	find $(COVERED) -name '*.gcda' -delete
	cd $(COVERED) && $(PYTHON) -m coverage erase
	-cd $(COVERED) && PYTHONPATH=$(COVERED) $(PYTHON) -m coverage run -m pytest -n auto --dist loadfile $(TESTS)
	cd $(COVERED) && $(PYTHON) -m coverage combine -q
	cd $(COVERED) && $(PYTHON) -m coverage report --skip-covered; python=$$?; \
		$(PYTHON) -m gcovr --fail-under-line 95 && exit $$python

docs: ## these pages, into docs/_build; every warning is an error
	$(PYTHON) -m sphinx -n -W --keep-going docs docs/_build

picture: ## draw the picture of the README anew
	$(PYTHON) docs/pictures.py

bench: ## what an allocation costs here
	$(PYTHON) -m vpool bench

clean: ## what a build leaves, but for compiled modules
	rm -rf build dist docs/_build docs/_pictures *.egg-info
