# Needs Python 3.11+ and make. `make test` and `make demo` create .venv, install and run.
#
#   make test                    the test suite
#   make demo                    the main job: trains, measures and reports under runs/tiny
#   make demo DEMO="--seeds 3"   options of `satlens reproduce tiny`
#   make figures                 every figure of studies/ again, from their tables
#   make findings                docs/findings.md and the ledger again, from the same tables
#   make notebooks               execute every notebook
#   make browser                 the report's pages in headless Chromium, which has to be installed
#   make docs                    the documentation, as pages under site/
#   make zoo                     train the models that ship with the package again
#
# PYTHON chooses the interpreter, TORCH_INDEX another index for torch (for example
# https://download.pytorch.org/whl/cpu, which is much smaller than the default build on Linux).

PYTHON ?= python3
TORCH_INDEX ?=
DEMO ?=
TESTS ?=
BIN := .venv/bin

.PHONY: install test slow browser demo figures findings notebooks docs zoo lint types clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "satlens needs Python 3.11 or newer; run: make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt \
		$(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[data,dev,docs,eval,notebooks,trackers]'
	@touch $@

test: install
	$(BIN)/python -m pytest $(TESTS)

slow: install
	$(BIN)/python -m pytest -m slow $(TESTS)

browser: install
	$(BIN)/python -m pytest -m browser -n 0 tests/browser

demo: install
	$(BIN)/satlens reproduce tiny $(DEMO)

figures: install
	for study in studies/*/; do $(BIN)/satlens figures $$study || exit 1; done

findings: install
	$(BIN)/satlens findings studies/satformer studies/rd-attnres --out docs/findings.md

notebooks: install
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --nbmake --nbmake-timeout=300 notebooks

docs: install
	$(BIN)/typer satlens.cli utils docs --name satlens --output docs/cli.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

zoo: install
	$(BIN)/satlens reproduce zoo
	$(BIN)/python -m satlens.checkpoints.zoo runs/zoo

lint: install
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: install
	$(BIN)/pyright --pythonpath $(BIN)/python

clean:
	rm -rf .venv
