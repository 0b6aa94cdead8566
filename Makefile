# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-oldest test-newest mutants chaos lint docs serve runs pages defaults bench bench-env release clean

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

demo: .venv/ready
	$(BIN)/dubito compare digits --jobs 2 --out runs/demo

test: lint
	$(BIN)/python -m pytest -n 2 -rs

# The suite, or a part of it, with the oldest packages that pyproject.toml allows, and with the newest, in environments
# of their own: `make test-oldest TESTS="tests/storage -x"`.
test-oldest test-newest:
	$(PYTHON) -m tests.matrix $(@:test-%=%) $(TESTS)

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

# All that is made of the papers' stored results: pictures, pages, README's counts; some pictures show images, for which
# the data must lie in a folder of DUBITO_DATA.
pages: .venv/ready
	$(BIN)/python -m papers pictures
	for page in k_tied.page references.page defaults.page mixtures.page bali.uci.deviations; do \
		$(BIN)/python -m papers.$$page || exit 1; \
	done
	$(BIN)/python docs/generate/readme.py

# The tables behind the defaults through the same queue, and their page; with the data in a folder of DUBITO_DATA.
defaults: .venv/ready
	$(BIN)/python -m papers runs --only "defaults-*" $(RUNS)
	$(BIN)/python -m papers.defaults.page

# Every bar, with other libraries where they are installed: `make bench BENCH="--only start --rounds 3"` for a part.
bench: .venv/ready
	$(BIN)/python -m benchmarks $(BENCH)

# Other libraries in an environment of their own (they ask for torchvision, which is not needed; NGBoost for pandas 2),
# and their outputs that docs/coming-from.md is tested against.
bench-env:
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch numpy torchmetrics einops einconv linear_operator opt_einsum unfoldNd
	.venv-peers/bin/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps laplace-torch bayesian-torch backpack-for-pytorch curvlinops-for-pytorch asdfghjkl torch-uncertainty
	.venv-peers/bin/pip install --quiet --disable-pip-version-check ngboost "pandas<3" scikit-learn lightning
	.venv-peers/bin/python -P benchmarks/peers.py  # -P: benchmarks/laplace.py is not theirs
	.venv-peers/bin/python -P benchmarks/peers_evidence.py

docs: .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	$(BIN)/mkdocs build --strict

# Every step of a release but the upload: sdist, wheel, their metadata, and installs into empty environments.
release: .venv/ready
	rm -rf dist
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt build twine
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*
	for extras in "" "[all]"; do \
		$(PYTHON) -m venv --clear .venv-release && \
		.venv-release/bin/pip install --quiet -c constraints.txt "$$(ls dist/*.whl)$$extras" && \
		.venv-release/bin/pip check && \
		env -u PYTHONPATH .venv-release/bin/python tests/matrix/smoke.py || exit 1; \
	done
	@echo "ready; the upload is left to you: $(BIN)/twine upload dist/*"

# The site at http://127.0.0.1:8000, built anew when a page changes.
serve: docs
	$(BIN)/mkdocs serve

clean:
	rm -rf .venv .venv-oldest .venv-newest .venv-release .venv-peers dist runs site
