# Everything runs in .venv, or another folder by VENV=, which these targets make and fill themselves: a fresh machine needs Python 3.11 to 3.13,
# git, make and a C++17 compiler. `make help` lists the targets.

PYTHON ?= python3
MPI ?= mpich
# For the PyTorch backend. Pinned here, and only here, because an open range may take a build with gigabytes of CUDA.
TORCH ?= torch==2.13.0
LINTERS := ruff==0.17.5 mypy==2.4.1 clang-format==23.1.5
# The last ones that Python 3.11 can have.
DOCS := sphinx==9.0.4 myst-nb==1.4.0 furo==2025.12.19
WHEELS := build==1.6.1 auditwheel==6.8.2 wheel==0.48.0
PYTEST_ARGS ?=
# Containers may set it. Then each of the processes that tests start, more than a thousand, would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

VENV ?= .venv
BIN := $(VENV)/bin
# Python compiles what is imported: compiling all of TensorFlow, JAX and PyTorch takes most of a minute.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
NATIVE := $(shell find native -type f 2>/dev/null)
CXX_SOURCES := $(shell find native examples/c benchmarks/gpu -name '*.c' -o -name '*.cpp' -o -name '*.hpp' -o -name '*.h')

.DEFAULT_GOAL := help
.PHONY: help demo test sanitize soak test-oldest test-mpi gan3d largebatch localsgd mesh contacts cosmoflow cosmogan atoms resnet50 bench bench-hosts bench-peers simulate simulate-large timelines docs linkcheck wheels lint format clean

help:  ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 12

demo: $(VENV)/stamp-demo  ## train a CNN on real digits on 1 rank and on 2; charts go to results/
	$(BIN)/python -m examples.cnn.demo

# Three files at a time, on two cores: many tests wait for time limits. Tests that share a job keep together: tests/conftest.py.
test: $(VENV)/stamp-test  ## all tests, ranks started by mpiexec included
	$(BIN)/python -m pytest --numprocesses 3 --dist loadscope $(PYTEST_ARGS)

sanitize: $(VENV)/stamp-test  ## the engine under ThreadSanitizer, and with MPI under AddressSanitizer; an hour
	$(BIN)/python -m pytest -m soak tests/test_sanitizer.py $(PYTEST_ARGS)

soak: $(VENV)/stamp-test $(VENV)/stamp-docs $(VENV)/stamp-wheels  ## the tests that `make test` leaves out because they take long
	$(BIN)/python -m pytest -m soak $(PYTEST_ARGS)

test-oldest:  ## the tests with the oldest Keras, TensorFlow and JAX that are supported, in .venv-oldest
	PIP_CONSTRAINT=$(CURDIR)/tests/oldest.txt $(MAKE) test VENV=.venv-oldest

gan3d: $(VENV)/stamp-demo  ## train the 3DGAN on 1 rank and on 2, several seeds; 20 to 50 minutes; report in results/gan3d
	$(BIN)/python -m examples.gan3d.study

largebatch: $(VENV)/stamp-demo  ## train with batches of 64 to 4,096 by SGD and by LARS, three seeds; table and picture in examples/largebatch
	$(BIN)/python -m examples.largebatch.study --readme

mesh: $(VENV)/stamp-test  ## find cells of meshes that will be tangled, each sample on 1, 2 and 4 ranks, three seeds; results/mesh
	$(BIN)/python -m examples.mesh.study

localsgd: $(VENV)/stamp-demo  ## train with gradients and with weights averaged, every 1 to 62 steps, three seeds; table and picture in examples/localsgd
	$(BIN)/python -m examples.localsgd.study --readme

contacts: $(VENV)/stamp-demo  ## learn the contact maps of a toy protein on 1 rank and on 2, three seeds; report in results/contacts
	$(BIN)/python -m examples.contacts.study

cosmoflow: $(VENV)/stamp-demo  ## tell the parameters of universes on 1 rank and on 2, three seeds; table and picture in examples/cosmoflow
	$(BIN)/python -m examples.cosmoflow.study --readme

cosmogan: $(VENV)/stamp-demo  ## generate maps of weak lensing on 1 rank and on 2, twelve seeds, an hour or two; table and pictures in examples/cosmogan
	$(BIN)/python -m examples.cosmogan.study --seeds 12 --readme

atoms: $(VENV)/stamp-demo  ## tell crystals by images of their atoms on 1 rank and on 2, three seeds; table and pictures in examples/atoms
	$(BIN)/python -m examples.atoms.study --readme

resnet50: $(VENV)/stamp-demo  ## train ResNet-50 by the recipe of ImageNet on digits, on 1 rank and on 2; table and picture in examples/resnet50
	$(BIN)/python -m examples.resnet50.study --readme

test-mpi: $(VENV)/stamp-test  ## train on 2 hosts with every MPI, by mpiexec and srun (root; Slurm; Debian's mpich, openmpi-bin)
	$(BIN)/python -m pytest --every-mpi -m mpi tests/cluster/test_mpis.py $(PYTEST_ARGS)

BENCH := $(BIN)/python -m benchmarks
PAGE := $(BENCH) page docs/performance/*.json --out docs/performance.md

bench: $(VENV)/stamp-demo  ## measure the engine against the MPI library, and training steps; writes docs/performance.md
	mkdir -p docs/performance
	$(BENCH) allreduce --ranks 2 --json docs/performance/$(MPI).json --plot docs/performance/$(MPI).png
	$(BENCH) overlap --ranks 2 --json docs/performance/$(MPI)-overlap.json
	$(BIN)/python -m examples.cnn.benchmark --model lenet --out results/benchmark/lenet
	cp results/benchmark/lenet/benchmark.json docs/performance/training-lenet.json
	$(PAGE)

bench-hosts: $(VENV)/stamp-demo  ## the same on 2 hosts made of namespaces, 2 ranks each (needs root and iproute2)
	mkdir -p docs/performance
	$(BENCH) allreduce --ranks 2 --hosts 2 --json docs/performance/$(MPI)-hosts.json
	$(BENCH) allreduce --ranks 2 --hosts 2 --bytes 128Ki,1Mi,8Mi,64Mi --wire-dtype float16 --json docs/performance/$(MPI)-hosts-float16.json
	$(PAGE)

# Debian's libsimgrid-dev is installed if it is missing and this user may do so; else the simulator says what is missing.
SIMGRID := command -v smpirun >/dev/null || { [ $$(id -u) -eq 0 ] && command -v apt-get >/dev/null && apt-get -qq update && \
  apt-get -qq install -y --no-install-recommends libsimgrid-dev; } || true

simulate: $(VENV)/stamp-demo  ## simulate steps on 2 to 1,024 nodes with SimGrid; 10 minutes; writes docs/performance/scaling.json
	$(SIMGRID)
	$(BENCH) scaling --json docs/performance/scaling.json --plot docs/performance/scaling.png
	$(PAGE)

simulate-large: $(VENV)/stamp-demo  ## simulate steps on 1,024 and 4,096 nodes; an hour, 5 GB; writes docs/performance/scaling-large.json
	$(SIMGRID)
	$(BENCH) scaling --large --jobs 1 --json docs/performance/scaling-large.json
	$(PAGE)

# Of a real job, which the simulator repeats on other machines: on a machine that has nothing else to do.
timelines: $(VENV)/stamp-demo  ## record when a step of ResNet50 and of Inception v3 has which gradient; writes docs/performance/timelines
	mkdir -p docs/performance/timelines
	$(BENCH) timeline --model ResNet50 --out docs/performance/timelines/resnet50.json
	$(BENCH) timeline --model InceptionV3 --out docs/performance/timelines/inceptionv3.json

# Every backend, so TORCH and JAX as well: the environment of the tests.
bench-peers: $(VENV)/stamp-test  ## training steps beside mpi4py, Horovod, MWMS, DDP and DataParallel, each in its own environment; an hour
	status=0; for model in lenet resnet50 mlp; do \
	  $(BIN)/python -m benchmarks.peers.compare --model $$model --out results/peers || status=1; \
	  cp results/peers/$$model.json docs/performance/peers-$$model.json || status=1; done; \
	$(PAGE) && exit $$status

# Sphinx gives each of so many processes a share of the pages in a row; with fewer, one would run all notebooks.
docs: $(VENV)/stamp-docs  ## build the documentation site in docs/_build/html, notebooks run; two minutes
	KERAS_BACKEND=tensorflow $(BIN)/python -m sphinx -j 40 -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

linkcheck: $(VENV)/stamp-docs  ## look whether the links of the site to other sites lead somewhere (needs the internet)
	DOCS_WITHOUT_NOTEBOOKS=1 KERAS_BACKEND=tensorflow $(BIN)/python -m sphinx -q -b linkcheck docs docs/_build/links

wheels: $(VENV)/stamp-wheels  ## a source archive and wheels for the Pythons found, in dist/; for aarch64 with its compiler
	$(BIN)/python packaging/wheels.py

lint: $(VENV)/stamp-test $(VENV)/stamp-lint  ## ruff, clang-format, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CXX_SOURCES)
	$(BIN)/mypy

format: $(VENV)/stamp-lint  ## let ruff and clang-format rewrite the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)

clean:  ## remove builds, caches and results; the environment stays (rm -r $(VENV) removes it)
	rm -rf build dist results docs/_build docs/reference/commands.md .mypy_cache .pytest_cache .ruff_cache .hypothesis $(VENV)/stamp-*
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14) and "keras_hpc needs Python 3.11 to 3.13; try: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

# What pyproject.toml names as build requirements, plus cmake and ninja, so that --no-build-isolation finds them.
$(VENV)/stamp-build: pyproject.toml | $(VENV)/bin/python
	$(PIP) cmake ninja $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"])')
	touch $@

# Editable, because Python started in the repository root would otherwise import the source folder, which has no _native.
$(VENV)/stamp-demo: $(VENV)/stamp-build $(NATIVE)
	$(PIP) --no-build-isolation --editable '.[tensorflow,$(MPI),examples]'
	touch $@

$(VENV)/stamp-test: $(VENV)/stamp-demo
	$(PIP) '$(TORCH)'
	$(PIP) --no-build-isolation --editable '.[tensorflow,jax,$(MPI),examples,test]'
	touch $@

$(VENV)/stamp-lint: Makefile | $(VENV)/bin/python
	$(PIP) $(LINTERS)
	touch $@

$(VENV)/stamp-docs: Makefile $(VENV)/stamp-demo
	$(PIP) $(DOCS)
	touch $@

$(VENV)/stamp-wheels: Makefile | $(VENV)/bin/python
	$(PIP) $(WHEELS)
	touch $@
