# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test mutants chaos lint docs serve runs defaults bench bench-env clean

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

demo: .venv/ready
	$(BIN)/dubito compare digits --jobs 2 --out runs/demo

test: lint
	$(BIN)/python -m pytest -n 2 -rs

# Plants bugs in a copy of the tree, one at a time, and runs the test that must notice: `make mutants ONLY=laplace`.
mutants: .venv/ready
	$(BIN)/python -m tests.mutants $(ONLY)

# Campaigns against the library, about half an hour on two cores: `make chaos CHAOS="files --size 0.1 --seed 3"`.
chaos: .venv/ready
	$(BIN)/python -m tests.chaos $(CHAOS)

lint: .venv/ready
	$(BIN)/ruff format --check src papers tests benchmarks
	$(BIN)/ruff check src papers tests benchmarks
	$(BIN)/pyright

# The papers' cells that were not run yet; stop and start it at any time. RUNS="--only bali --jobs 1" for a part.
runs: .venv/ready
	$(BIN)/python -m papers runs $(RUNS)

# The tables behind the defaults through the same queue, and their page; with the data in a folder of DUBITO_DATA.
defaults: .venv/ready
	$(BIN)/python -m papers runs --only "defaults-*" $(RUNS)
	$(BIN)/python -m papers.defaults.page

# Every bar, with other libraries where they are installed: `make bench BENCH="--only start --rounds 3"` for a part.
bench: .venv/ready
	$(BIN)/python -m benchmarks $(BENCH)

# Other libraries in an environment of their own (they ask for torchvision, which is not needed), and their outputs
# that docs/coming-from.md is tested against.
bench-env:
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch numpy torchmetrics einops opt_einsum unfoldNd
	.venv-peers/bin/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps laplace-torch bayesian-torch backpack-for-pytorch curvlinops-for-pytorch asdfghjkl
	.venv-peers/bin/python -P benchmarks/peers.py  # -P: benchmarks/laplace.py is not theirs

docs: .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	$(BIN)/mkdocs build --strict

# The site at http://127.0.0.1:8000, built anew when a page changes.
serve: docs
	$(BIN)/mkdocs serve

clean:
	rm -rf .venv runs site
