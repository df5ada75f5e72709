# On a fresh machine with Python 3.11+, pip and make, each of these installs what it needs first:
#
#   make demo     train the example; ARGS="--plain" and the like are passed on (--help lists them)
#   make test     the test suite, without `make thorough`; ARGS="-k verify" and the like are passed
#                 on to pytest
#   make gpu      the tests that need an NVIDIA GPU, but for the zoo's (four to five minutes on 16 cores)
#   make thorough   what `make test` leaves out: more random draws, the longest of similar tests
#   make limits   200 random models under random budgets, each in a process whose memory is limited:
#                 it runs within them or is refused (Linux; some 5 minutes of one core)
#   make matrix   a fast part of the tests, on every version of torch that is supported
#   make zoo      models of transformers, torchvision, timm and diffusers against the plain ones;
#                 ARGS="--only t5", ARGS=--write (docs/zoo.md), ARGS=--lengths (captures while sizes change)
#   make examples  the loops in examples/ with and without the one line, and the tests that need
#                 Accelerate, PEFT, TRL, Lightning, bitsandbytes or torchao, which `make test` skips
#   make docs     the documentation as a site, in site/; a broken link is an error
#   make lint     ruff, mypy --strict, and docstrings and class names (tests/prose.py)
#   make bench    the benchmarks (an NVIDIA GPU), `make peers` first
#   make peers    the same training steps by DeepSpeed, FSDP2, RoundPipe, torchao and PyTorch, into
#                 benchmarks/results and docs/measured.md (an NVIDIA GPU, up to five hours);
#                 ARGS="--out FILE --continue" goes on with a file
#   make format   ruff's formatter and its safe fixes
#   make clean    remove .venv, .zoo, .examples, .matrix, site, dist and every cache
#
# Settings, each `make demo NAME=value`:
#
#   PYTHON   the interpreter that .venv is made from.
#   VENV     where it is made.
#   ZOO      where `make zoo` makes its own: torchvision is built for one torch, and where that is
#            another one than ours, transformers cannot be imported beside it.
#   EXAMPLES  where `make examples` makes its own: the packages are many, and none is ours.
#   TORCH    what pip installs when torch is missing, too old or too new. It goes in first and alone: left to
#            the package's own requirement, pip takes the newest build, gigabytes of CUDA libraries
#            on a machine that has no use for them. A path or URL of a wheel does as well.
#   PY       run with this interpreter as it is: no .venv, nothing installed. For a machine that has
#            torch and no network: `make test PY=python3`.
#   WHEELS   a folder that has what `make peers` compares and is not installed. Without it, and
#            without DeepSpeed and the like, their rows say so.
#   MATRIX   the versions of torch that `make matrix` runs. Each gets a virtual environment of its own
#            below .matrix/: some 5 GB on Linux, where torch comes with CUDA. `make -k matrix` goes on
#            to the other versions when one fails.
#   MATRIX_2_11, MATRIX_2_12, ...   a virtual environment that is there already, instead.
#
# An interpreter that already holds torch lends it to .venv (--system-site-packages).

PYTHON ?= python3
VENV ?= .venv
ZOO ?= .zoo
EXAMPLES ?= .examples
TORCH ?= torch==2.13.0
ARGS ?=

# The versions stand in pyproject.toml and in compat/ too: tests/compat/test_compilers.py compares them.
MATRIX ?= 2.11 2.12 2.13 2.14 2.15
# Torch's private APIs, capture, numbers, gradients, the update, loops over real models: what a new
# version of torch breaks.
FAST := tests/compat $(wildcard tests/equality/test_capture*.py) tests/equality/test_numbers.py \
	tests/stateful/test_training.py tests/models/test_real_loops.py tests/ranks/test_one_rank.py
# Where other packages are skipped if they are not there.
LOOPS := $(patsubst %,tests/models/test_%.py, float8 quantized_bases real_loops \
	examples) \
	$(patsubst %,tests/%.py, stateful/test_lifetimes \
	ranks/test_torchrun)

ifdef PY
INSTALLED :=
DOCS_INSTALLED :=
ZOO_PY = $(PY)
ZOO_INSTALLED :=
EXAMPLES_PY = $(PY)
EXAMPLES_INSTALLED :=
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
DOCS_INSTALLED := $(VENV)/.docs
ZOO_PY := $(ZOO)/bin/python
ZOO_INSTALLED := $(ZOO)/.zoo
EXAMPLES_PY := $(EXAMPLES)/bin/python
EXAMPLES_INSTALLED := $(EXAMPLES)/.examples
endif

PYTHON_IS_NEW_ENOUGH = import sys; sys.version_info >= (3, 11) or sys.exit( \
	"megacompile needs Python 3.11 or newer, got " + sys.version.split()[0] + " as $(PYTHON); " \
	"name another: make PYTHON=python3.12")
HAS_TORCH = import importlib.metadata as m, sys; \
	version = lambda text: [int(part) for part in text.split(".")[:2]]; \
	sys.exit(not version("$(firstword $(MATRIX))") <= version(m.version("torch")) \
		<= version("$(lastword $(MATRIX))"))

TORCH_VERSION = import importlib.metadata as m; print(m.version("torch"))

# One worker a core, each with half of the files: what a file makes once is made once. A machine
# without pytest-xdist runs the tests one by one.
IN_PARALLEL = import importlib.util as u; \
	print("-n auto --dist worksteal" if u.find_spec("xdist") else "")

# A worker takes a test when it is free: on a GPU some take minutes.
TEST_BY_TEST = import importlib.util as u; \
	print("-n auto --dist load --maxschedchunk 1" if u.find_spec("xdist") else "")

.PHONY: demo test gpu thorough limits matrix zoo examples docs lint bench peers format clean
.DELETE_ON_ERROR:

demo: $(INSTALLED)
	$(PY) examples/train_lm.py $(ARGS)

test: $(INSTALLED)
	$(PY) -m pytest $$($(PY) -c '$(IN_PARALLEL)') $(ARGS)

gpu: $(INSTALLED)
	$(PY) -m pytest $$($(PY) -c '$(TEST_BY_TEST)') -m gpu --ignore tests/models/test_zoo.py $(ARGS)

thorough: $(INSTALLED)
	$(PY) -m pytest $$($(PY) -c '$(IN_PARALLEL)') -m thorough -o faulthandler_timeout=1200 $(ARGS)

limits: $(INSTALLED)
	OMP_NUM_THREADS=1 $(PY) -m tests.budgets --cases 200 $(ARGS)

matrix: $(MATRIX:%=matrix-%)

# A virtual environment that was given is taken as it is; one of ours is made and filled first.
matrix-%:
	$(if $(MATRIX_$(subst .,_,$*)),,$(MAKE) .matrix/$*/.installed)
	$(call matrix_python,$*) -m pytest $$($(call matrix_python,$*) -c '$(IN_PARALLEL)') $(ARGS) $(FAST)

matrix_python = $(or $(MATRIX_$(subst .,_,$1)),.matrix/$1)/bin/python

.matrix/%/.installed: pyproject.toml
	@$(PYTHON) -c '$(PYTHON_IS_NEW_ENOUGH)'
	$(PYTHON) -m venv .matrix/$*
	.matrix/$*/bin/python -m pip install --no-cache-dir "torch==$*.*" --editable ".[dev]"
	touch $@

zoo: $(ZOO_INSTALLED)
	$(ZOO_PY) -m tests.zoo $(ARGS)

examples: $(EXAMPLES_INSTALLED)
	$(EXAMPLES_PY) -m pytest $$($(EXAMPLES_PY) -c '$(IN_PARALLEL)') $(ARGS) $(LOOPS)

docs: $(DOCS_INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict $(ARGS)

lint: $(INSTALLED)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m tests.prose
	$(PY) -m mypy

bench: peers
	$(PY) -m benchmarks.forward_backward
	$(PY) -m benchmarks.train_step
	$(PY) -m benchmarks.precision
	$(PY) -m benchmarks.head
	$(PY) -m benchmarks.predict
	$(PY) -m benchmarks.workloads

# 7 settings, 12 systems, 2 processes of each. The plot comes beside the JSON, the page after it.
peers: $(INSTALLED)
	$(PY) -m benchmarks.peers --model 3.9b 7.6b 14.8b --tokens 16x1024 64x1024 1x16384 --cap all 40 24 \
		--timeout 400 --minutes 300 --out benchmarks/results $(if $(WHEELS),--wheels $(WHEELS)) $(ARGS)
	$(PY) -m benchmarks.peers.page

format: $(INSTALLED)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:
	rm -rf $(VENV) $(ZOO) $(EXAMPLES) .matrix site build dist megacompile.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find megacompile passes runtime tests examples benchmarks -name __pycache__ -exec rm -rf {} +

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c '$(PYTHON_IS_NEW_ENOUGH)'
	if $(PYTHON) -c '$(HAS_TORCH)' 2>/dev/null; \
		then $(PYTHON) -m venv --system-site-packages $(VENV); \
		else $(PYTHON) -m venv $(VENV); fi
	$(VENV)/bin/python -c '$(HAS_TORCH)' 2>/dev/null || $(VENV)/bin/python -m pip install "$(TORCH)"
	$(VENV)/bin/python -m pip install --editable ".[dev]"
	touch $@

$(VENV)/.docs: $(VENV)/.installed
	$(VENV)/bin/python -m pip install --editable ".[docs]"
	touch $@

# Each torchvision asks for one torch. Told to leave ours, pip finds the torchvision that goes with it.
$(ZOO)/.zoo: pyproject.toml
	$(MAKE) VENV=$(ZOO) $(ZOO)/.installed
	$(ZOO)/bin/python -m pip install "torch==$$($(ZOO)/bin/python -c '$(TORCH_VERSION)')" \
		--editable ".[zoo]"
	touch $@

$(EXAMPLES)/.examples: pyproject.toml
	$(MAKE) VENV=$(EXAMPLES) $(EXAMPLES)/.installed
	$(EXAMPLES)/bin/python -m pip install \
		"torch==$$($(EXAMPLES)/bin/python -c '$(TORCH_VERSION)')" --editable ".[examples]"
	touch $@
