# Every target creates what it needs: a virtual environment in .venv, built once and rebuilt
# when pyproject.toml or constraints.txt change. Requires python3 (3.11+), make and git.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Many tests wait for child processes, so a few more run at a time than there are cores.
JOBS ?= 3

.PHONY: help demo test test-all integrations docs stress chaos versions lint format example bench evidence dist clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "gradherd needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version). Try: make PYTHON=python3.12 ..."; exit 1; }
	@echo "creating $(VENV) (once, about a minute)"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP) ## See what an order and few bytes gain, in a minute, and write a report
	@$(BIN)/gradherd demo

PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

test: $(STAMP) ## Run the tests but the slow ones, which tests/slow.txt lists
	@$(PYTEST) -m "not slow"

test-all: $(STAMP) ## Run all tests, as CI does
	@$(PYTEST)

# Lightning and Ray are large, and mkdocs is of no use to the tests: environments of their own.
.venv-integrations/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -m venv --clear .venv-integrations
	@.venv-integrations/bin/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt -e '.[dev,lightning,accelerate,transformers,ray]'
	@touch $@

integrations: .venv-integrations/.installed ## Run the conformance suite in every framework, and write its table
	@GRADHERD_INTEGRATIONS=all .venv-integrations/bin/python -m pytest -p no:cacheprovider \
		tests/integrations/test_elastic.py \
		tests/integrations/test_more.py tests/integrations/test_pages.py
	@.venv-integrations/bin/python -m tests.integrations.conformance

.venv-docs/.installed: constraints.txt
	@$(PYTHON) -m venv --clear .venv-docs
	@.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		mkdocs-material 'mkdocstrings[python]'
	@touch $@

docs: .venv-docs/.installed ## Build the documentation site in site/
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet
	@echo "open site/index.html"

stress: $(STAMP) ## Kill runs 200 times, change their ranks, 10,000 damaged files, 2,300 loops (one hour)
	@$(BIN)/python -m tests.attach.loops --loops 2000
	@$(BIN)/python -m tests.stress.loops --loops 300 --sizes 2,4,3
	@$(BIN)/python -m tests.stress.kills --kills 200
	@$(BIN)/python -m tests.stress.resizes --chains 20
	@$(BIN)/python -m tests.stress.shards --steps 200 --kills 5
	@$(BIN)/python -m tests.stress.fuzz --inputs 10000

TASK ?= digits-mlp
chaos: $(STAMP) ## Let nine faults happen to a task (TASK=my_task.py:MyTask) on local ranks, trained in four ways
	@$(BIN)/python -m benchmarks.chaos $(TASK)

versions: $(STAMP) ## Run a suite with several versions of torch, each in an environment of its own
	@$(BIN)/python -m benchmarks.versions

lint: $(STAMP) ## Check style and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(STAMP) ## Format the code
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

example: $(STAMP) ## Train with two workers under torchrun
	@$(BIN)/torchrun --standalone --nproc-per-node 2 examples/train_ddp.py --epochs 3

bench: $(STAMP) ## Measure what ordering costs, next to the alternatives
	@$(BIN)/gradherd bench coordination --workers 2,4 --dim 1e6
	@$(BIN)/gradherd bench step
	@$(BIN)/gradherd bench rows

evidence: $(STAMP) ## Run what is left of all studies (most need a GPU) and write the pages of evidence
	@for study in studies/*.toml; do $(BIN)/gradherd study $$study --resume || exit 1; done
	@$(BIN)/python -m studies.evidence

dist: $(STAMP) ## Build the wheel and the source distribution in dist/
	@rm -rf dist
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt build
	@$(BIN)/python -m build --outdir dist . > dist.log 2>&1 || { cat dist.log; exit 1; }
	@rm -f dist.log; ls -l dist

clean: ## Remove the virtual environment and caches
	rm -rf $(VENV) .venv-integrations .venv-docs site .pytest_cache .ruff_cache .mypy_cache .hypothesis dist
