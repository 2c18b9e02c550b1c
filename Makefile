# make demo | make test | make data; PYTHON=python3.13 picks the interpreter.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TAG := $(shell $(PYTHON) -c 'import sys; print("py%d%d" % sys.version_info[:2])')
CONSTRAINTS ?= constraints/$(TAG).txt
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Tests run on virtual CPU devices, whatever else the machine has. The TPU compiler lies
# beside the environment: where libtpu is installed, JAX looks for a TPU at every start.
TEST_ENV := JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 PYTHONPATH=$(abspath $(VENV))/tpu
# Most of the tests' time is compiling, and many compile the same programs.
TEST_ENV += JAX_COMPILATION_CACHE_DIR=$(abspath .cache)/jax \
  JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1
# Tests start many processes, which find the library compiled, whatever the shell says.
TEST_ENV += PYTHONDONTWRITEBYTECODE=
DEMO_OPTIONS ?=
EXTRAS ?= test,lint

.PHONY: demo data test bits lint types imports pytest test-exhaustive test-optional \
  test-gpu-programs test-matrix test-colab test-all notebooks docs dist lock clean

demo: $(VENV)/.run-$(TAG)
	@$(BIN)/python -m models.train $(DEMO_OPTIONS)

data: $(VENV)/.run-$(TAG)
	@$(BIN)/python -m models.prepare_data

# What continuous integration runs: one test of each kind; the slow ones are in test-all.
# States have the same bits on every mesh with the kernels that users have. The other tests
# compare within rounding, or what is only moved, and run with kernels that compile faster
# (tests/devices.py); test-all runs them with those of users, too.
BITS := tests/test_create.py tests/test_create_under_a_mesh.py
RANDOM_BITS := tests/test_arrays.py::test_random_values_are_the_unsharded_ones_bit_for_bit

# The type checker, which uses one core, runs beside the first of them.
test: lint imports
	$(MAKE) --no-print-directory --jobs=2 types bits
	MESHLAYOUT_OLDER_KERNELS=1 MESHLAYOUT_UNOPTIMIZED=1 $(MAKE) --no-print-directory \
	  pytest PYTEST_OPTIONS='-m "not slow" $(BITS:%=--ignore=%) \
	  --deselect=$(RANDOM_BITS)'

bits: $(VENV)/.dev-$(TAG)
	$(MAKE) --no-print-directory pytest PYTEST_OPTIONS='-m "not slow" $(BITS) $(RANDOM_BITS)'

lint: $(VENV)/.dev-$(TAG)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

imports: $(VENV)/.dev-$(TAG)
	$(BIN)/lint-imports

types: $(VENV)/.dev-$(TAG)
	$(BIN)/pyright --pythonpath $(BIN)/python

pytest: $(VENV)/.dev-$(TAG)
	$(TEST_ENV) $(BIN)/python -m pytest -q -n 2 $(PYTEST_OPTIONS)

# The other supported interpreters and versions, each in an environment of its own;
# those that are not on this machine are named and left out.
test-matrix:
	@failed=; for set in 3.12:py312 3.13:py313 3.13:colab; do \
	  name=$${set##*:}; \
	  python=$$(ls "$$(command -v python$${set%%:*} || true)" \
	    $(HOME)/.pyenv/versions/$${set%%:*}.*/bin/python 2>/dev/null | tail -n 1); \
	  if test -n "$$python"; then \
	    echo "== $$name with $$python"; \
	    $(MAKE) --no-print-directory pytest PYTHON=$$python VENV=.venv-$$name \
	      CONSTRAINTS=constraints/$$name.txt || failed="$$failed $$name"; \
	  else echo "== $$name: no Python $${set%%:*} here, left out"; fi; \
	done; \
	test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

# Every combination of what `make test` covers in pairs.
test-exhaustive: $(VENV)/.dev-$(TAG)
	MESHLAYOUT_EXHAUSTIVE=1 MESHLAYOUT_OLDER_KERNELS=1 $(MAKE) --no-print-directory \
	  pytest PYTEST_OPTIONS=tests/test_same_numbers.py

# What works with other people's packages, some of them heavy: TensorFlow, PyTorch; and
# their models. What gemma requires is for training it, and most of it is not imported.
OPTIONAL := VENV=.venv-optional EXTRAS=test,optional,published
test-optional:
	$(MAKE) --no-print-directory .venv-optional/.dev-$(TAG) $(OPTIONAL)
	.venv-optional/bin/python -m pip install --quiet --disable-pip-version-check \
	  --no-deps gemma kauldron
	$(MAKE) --no-print-directory pytest $(OPTIONAL) \
	  PYTEST_OPTIONS="tests/test_data_heavy.py tests/test_data_adapters.py \
	  tests/test_metrics.py tests/test_callbacks.py \
	  tests/test_checkpoint_store.py tests/test_published_models.py tests/test_ray.py \
	  tests/test_parameter_server_ray.py tests/test_tf_distribute.py tests/test_docs.py"

# Programs for GPUs, which JAX's plugin for CUDA compiles without one. It lies beside the
# environment, as libtpu does: JAX looks for a GPU where it is installed.
test-gpu-programs: $(VENV)/.dev-$(TAG)
	version=$$($(BIN)/python -c 'import jax; print(jax.__version__)'); \
	$(PIP_INSTALL) --no-deps --upgrade --target $(VENV)/cuda \
	  "jax-cuda12-plugin==$$version" "jax-cuda12-pjrt==$$version"
	$(TEST_ENV) PYTHONPATH=$(abspath $(VENV))/tpu:$(abspath $(VENV))/cuda \
	  $(BIN)/python -m pytest -q tests/test_gpu_programs.py

# The notebooks as on Colab's TPU machines: their packages, no TensorFlow, no checkout.
# The first cell installs the library as it is here, by the repository's address.
COLAB := .venv-colab-tpu
test-colab: $(VENV)/.dev-$(TAG)
	@python=$$(ls "$$(command -v python3.13 || true)" \
	  $(HOME)/.pyenv/versions/3.13.*/bin/python 2>/dev/null | tail -n 1); \
	test -n "$$python" || { echo "== no Python 3.13 here, left out"; exit 0; }; \
	test $(COLAB)/.made -nt constraints/colab_tpu.txt || { \
	  $$python -m venv --clear $(COLAB) && $(COLAB)/bin/python -m pip install --quiet \
	    --disable-pip-version-check --requirement constraints/colab_tpu.txt \
	    && touch $(COLAB)/.made; } && \
	MESHLAYOUT_COLAB=$(abspath $(COLAB))/bin/python $(TEST_ENV) $(BIN)/python \
	  -m pytest -q tests/test_notebooks.py -k colab

test-all: lint imports types pytest test-exhaustive test-optional test-gpu-programs \
  test-matrix test-colab docs

# Runs the notebooks and writes their outputs, which are committed.
notebooks: $(VENV)/.dev-$(TAG)
	JAX_PLATFORMS=cpu $(BIN)/python -m tests.notebook_runs $(NAMES)

# The site, with the notebooks as they are committed, in .cache/docs/site. Links and
# pictures that lead nowhere are errors (docs/build.py). The programs of README and of
# the pages run; `make test-optional` runs those that need PyTorch or Ray, too.
DOCS := VENV=.venv-docs EXTRAS=docs,test
docs:
	$(MAKE) --no-print-directory .venv-docs/.dev-$(TAG) $(DOCS)
	JAX_PLATFORMS=cpu .venv-docs/bin/python docs/build.py
	$(MAKE) --no-print-directory pytest $(DOCS) \
	  PYTEST_OPTIONS="tests/test_docs.py tests/test_readme.py"

# What is published: a wheel of the library and an archive of the sources.
dist: $(VENV)/.dev-$(TAG)
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist

# One environment for one interpreter: another one starts it anew.
$(VENV)/.made-$(TAG):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "meshlayout needs Python 3.11 or later; choose one with make PYTHON=python3.13")'
	@test -e $(CONSTRAINTS) || { echo "There are no pinned versions for this Python ($(CONSTRAINTS)). Try PYTHON=python3.13."; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.run-$(TAG): $(VENV)/.made-$(TAG) pyproject.toml $(CONSTRAINTS)
	$(PIP_INSTALL) --constraint $(CONSTRAINTS) --editable .
	@touch $@

$(VENV)/.dev-$(TAG): $(VENV)/.made-$(TAG) pyproject.toml $(CONSTRAINTS)
	$(PIP_INSTALL) --constraint $(CONSTRAINTS) --editable '.[$(EXTRAS)]'
	@case "$$(uname -sm)" in "Linux x86_64") \
	  $(PIP_INSTALL) --no-deps --upgrade --target $(VENV)/tpu \
	    --requirement constraints/tpu/$(notdir $(CONSTRAINTS)) \
	    || echo "libtpu cannot be had here: the tests compile no TPU programs";; esac
	@touch $@ $(VENV)/.run-$(TAG)

# Writes the versions that pip resolves today: names and versions, no index address.
lock:
	rm -rf .venv-lock
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[test,lint]'
	.venv-lock/bin/python -m pip freeze --exclude-editable > constraints/$(TAG).txt
	rm -rf .venv-lock

clean:
	rm -rf .venv .venv-* .cache
