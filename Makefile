# The dev loop. `make run` and `make test` are all that a fresh machine needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Four processes stand in for cards; eight where there are cores enough.
CARDS ?= $(shell [ "$$(nproc)" -ge 4 ] && echo 8 || echo 4)

.PHONY: run test check bench clean

$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "supernode needs Python 3.11 or newer; run make PYTHON=python3.11")'
	@echo "Making $(VENV): PyTorch and other packages, about 1.5 GB; this takes some minutes and is done once."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[train,dev]'
	touch $(READY)

run: $(READY)  ## Train the demo: four or eight processes, one of them killed on the way.
	$(BIN)/supernode run examples/demo.yaml --cards $(CARDS)

test: $(READY)  ## All tests.
	$(BIN)/python -m pytest

check: $(READY)  ## Lint, types, import contracts, examples in the docs.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest --doctest-modules --doctest-glob='*.md' src README.md docs ARCHITECTURE.md

bench: $(READY)  ## Every benchmark; the last line of each is its JSON.
	for name in cli_start allocate launch parity step_time kill forecast_accuracy nccl_accuracy search_speed \
	    fabric_crosscheck routing placement million project_forecast events calibrated overlap hierarchy compress \
	    low_precision any_model long_sequences; do \
	  echo "== $$name"; $(BIN)/python benchmarks/$$name.py --json || exit 1; done

clean:  ## Remove the environment and what was built.
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
