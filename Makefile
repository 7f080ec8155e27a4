# make        say this
# make demo   compare methods on scikit-learn's digits: a table, and a page in runs/demo/report.html
# make test   lint, types and tests, as continuous integration does
# make docs   the documentation as a site, in site/index.html
# make bench  how much faster stacked clients are than one after another, on this machine
# make mutants  put faults into the methods and see which ones their tests miss; some only: METHODS="lips sparse_ft"
# make dist   the wheel and the source distribution of the last commit, built twice and compared, and the
#             bill of materials, in dist/
# make lock   choose the versions of release/deployment.txt anew, with the hashes of their files
# make sbom   what a deployment is made of, in CycloneDX's format, in dist/
# make lint | format | clean
#
# Everything is installed into .venv; the system's Python is only used to make it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
SAY := echo "Installing into $(VENV); the first time, PyTorch makes this take some minutes."

# For several processes on the same cores, and for models so small that a second thread gains nothing.
ONE_THREAD := OMP_NUM_THREADS=1 OMP_PROC_BIND=false

DEMO_NOTE := What to look at: the layers on the page. Under fedbn those in the middle stay where they were after the second \
round, under lips they move; its accuracy gains by that not here but on CIFAR-100 (results/lips-cifar100). ssfl sends \
little more than half of the bytes of fedavg.
# Chosen on seeds 0 and 1, and looked at again with seeds 10 to 12: results/demo-digits.
DEMO := compare "fedavg, ssfl, fedbn, lips" --data digits --clients 10 --model "cnn(depth=8)" --rounds 31 --batch-size 10 \
	--partition "dirichlet(alpha=1.0, samples=10, test_samples=50)" --evaluate-every 3 --engine stacked --seeds 3

.DELETE_ON_ERROR:
.PHONY: help demo test docs bench mutants dist lock sbom lint format clean

help:
	@sed -n 's/^# //p;/^#$$/q' Makefile

demo: $(VENV)/report.installed
	@rm -rf runs/demo
	$(ONE_THREAD) $(BIN)/fedstrata $(DEMO) --jobs auto --out runs/demo
	@echo "$(DEMO_NOTE)"

test: lint
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 --doctest-modules --doctest-ignore-import-errors tests fedstrata docs/site_pages

docs: $(VENV)/docs.installed
	NO_MKDOCS_2_WARNING=1 $(ONE_THREAD) $(BIN)/python -m mkdocs build --strict --quiet
	@echo site/index.html

lint: $(VENV)/dev.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

format: $(VENV)/dev.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/report.installed
	$(BIN)/python benchmarks/speed.py

dist: $(VENV)/release.installed
	@rm -rf dist build/twice && mkdir -p dist build/twice/1 build/twice/2
	@for try in 1 2; do \
		git archive HEAD | tar x -C build/twice/$$try && $(BIN)/python -m build --no-isolation build/twice/$$try >/dev/null; done
	cmp build/twice/1/dist/*.whl build/twice/2/dist/*.whl && cmp build/twice/1/dist/*.tar.gz build/twice/2/dist/*.tar.gz
	@cp build/twice/1/dist/* dist && rm -r build/twice && $(BIN)/python release/sbom.py >/dev/null
	@cd dist && sha256sum * > ../build/sums && mv ../build/sums SHA256SUMS && cat SHA256SUMS

LOCKED := pip compile pyproject.toml --extra flower --universal --python-version 3.11 --generate-hashes --quiet \
	--no-annotate --custom-compile-command "make lock"
CUDA := torch triton cuda-bindings cuda-pathfinder cuda-toolkit

lock: $(VENV)/release.installed
	$(BIN)/uv $(LOCKED) --upgrade --output-file release/deployment.txt >/dev/null
	$(BIN)/uv $(LOCKED) --constraint release/deployment.txt --output-file release/deployment-cpu.txt >/dev/null \
		$(CUDA:%=--no-emit-package %) $$(grep -o '^nvidia-[a-z0-9-]*' release/deployment.txt | sed 's/^/--no-emit-package /')

sbom: $(VENV)/release.installed
	@$(BIN)/python release/sbom.py

mutants: $(VENV)/mutants.installed
	$(ONE_THREAD) $(BIN)/python tests/mutants/run.py $(METHODS)

clean:
	rm -rf $(VENV) build dist site mutants *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Made anew whenever it was not made to its end.
$(VENV)/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "FedStrata needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3.12"; exit 2; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# Each of these holds the pyproject.toml with which it was made, so that nothing is fetched again without need.
$(VENV)/report.installed: pyproject.toml | $(VENV)/made
	@cmp -s pyproject.toml $@ || { $(SAY); $(PIP) install --editable '.[report]' && cp pyproject.toml $@; }
	@touch $@

$(VENV)/dev.installed: pyproject.toml | $(VENV)/made
	@cmp -s pyproject.toml $@ || { $(SAY); $(PIP) install --editable '.[dev,report,flower,vit,onnx]' && cp pyproject.toml $@; }
	@cp $@ $(VENV)/report.installed
	@touch $@

$(VENV)/docs.installed: pyproject.toml | $(VENV)/made
	@cmp -s pyproject.toml $@ || { $(SAY); $(PIP) install --editable '.[docs,report,flower]' && cp pyproject.toml $@; }
	@cp $@ $(VENV)/report.installed
	@touch $@

$(VENV)/mutants.installed: pyproject.toml | $(VENV)/made
	@cmp -s pyproject.toml $@ || { $(SAY); $(PIP) install --editable '.[dev,mutants]' && cp pyproject.toml $@; }
	@touch $@

$(VENV)/release.installed: pyproject.toml | $(VENV)/made
	@cmp -s pyproject.toml $@ || { $(SAY); $(PIP) install --editable '.[release]' && cp pyproject.toml $@; }
	@touch $@
