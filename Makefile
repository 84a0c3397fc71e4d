# `make demo` and `make test` do all set-up themselves, in .venv; `make help` lists the rest.

PYTHON ?= python3
PADDLE ?= paddlepaddle==3.3.1
MINUTES ?= 60
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(shell find custom_ops paddle_fused -name '*.py' -o -name '*.cc' -o -name '*.cu' \
	-o -name '*.h' -o -name '*.inc' -o -name '*.cuh' | grep -v _build_info.py) setup.py pyproject.toml MANIFEST.in

.PHONY: help venv demo test test-paddleformers bench lint format strict sanitize fuzz mutate cuda-compile gpu-test gpu-check \
	gpu-bench gpu-host-bench wheel-check clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## / - /'

venv: $(VENV)/installed  ## .venv with Paddle, the package and what demo and tests need

# Tools first: they change seldom, the package often.
$(VENV)/tools: requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(PADDLE)" -r requirements-dev.txt
	touch $@

# The wheel is built once, checked by the tests and installed: tests run what users get.
$(VENV)/installed: $(VENV)/tools $(SOURCES)
	rm -rf build/wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel .
	$(BIN)/python -m pip install --quiet --no-deps --force-reinstall build/wheel/paddle_fused-*.whl
	touch $@

demo: venv  ## train a mixture-of-experts language model, export it, serve it
	$(BIN)/python examples/train_moe.py

test: venv  ## all tests, and the examples in docstrings, README and docs
	$(BIN)/pytest tests

# Beside the environment, not in it: the other tests see no PaddleFormers.
build/paddleformers/installed: requirements-paddleformers.txt $(VENV)/tools
	rm -rf build/paddleformers
	$(BIN)/python -m pip install --quiet --no-deps --target build/paddleformers -r $<
	touch $@

test-paddleformers: venv build/paddleformers/installed  ## unmodified PaddleFormers, patched against plain
	PYTHONPATH=$(CURDIR)/build/paddleformers $(BIN)/pytest tests/with_paddleformers

# PyTorch in an environment of its own: only the benchmark wants it.
$(VENV)-torch/installed: requirements-bench.txt
	$(PYTHON) -m venv $(VENV)-torch
	$(VENV)-torch/bin/python -m pip install --quiet -r requirements-bench.txt
	touch $@

bench: venv $(VENV)-torch/installed  ## operators beside copies, Paddle and PyTorch on this CPU
	$(BIN)/python -m benchmarks.cpu --torch-python $(VENV)-torch/bin/python --demo-steps 60
	$(BIN)/python -m benchmarks.cpu.memory

lint: venv  ## formatting and import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files 'custom_ops/*.h' 'custom_ops/*.cc' 'custom_ops/*.inc' 'custom_ops/*.cu' 'custom_ops/*.cuh' 'benchmarks/*.cu' 'benchmarks/*.cc' 'tools/*.cc' 'tools/*.h' 'tests/*.cc' 'tests/*.inc')
	$(BIN)/lint-imports

format: venv  ## rewrite sources in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files 'custom_ops/*.h' 'custom_ops/*.cc' 'custom_ops/*.inc' 'custom_ops/*.cu' 'custom_ops/*.cuh' 'benchmarks/*.cu' 'benchmarks/*.cc' 'tools/*.cc' 'tools/*.h' 'tests/*.cc' 'tests/*.inc')

strict: venv  ## compile our sources with -Wall -Wextra -Werror
	$(BIN)/python tools/strict_compile.py

sanitize: venv  ## the CPU kernels under the address, undefined-behaviour and thread sanitizers
	$(BIN)/python tools/sanitize.py

fuzz: venv  ## search for wrong results, MINUTES=60
	$(BIN)/python tools/fuzz.py --minutes $(MINUTES)

mutate: venv  ## break the sources line by line, see whether the tests notice (half an hour)
	$(BIN)/python tools/mutate.py

cuda-compile: venv  ## compile the CUDA sources strictly; no GPU needed, says so without nvcc
	$(BIN)/python tools/cuda_compile.py

gpu-test:  ## tests on the GPU, with the python that has a CUDA Paddle (PYTHON=...)
	$(PYTHON) -m pytest tests/gpu
	$(PYTHON) -m pytest tests/ops --device gpu

gpu-check:  ## kernels by raw pointer against the oracle, with the python that has PyTorch
	PYTHONPATH=tests $(PYTHON) -m benchmarks.gpu.check

gpu-bench:  ## kernels against copies and peers on the GPU, with the python that has PyTorch
	$(PYTHON) -m benchmarks.gpu_kernels --jobs 8

gpu-host-bench:  ## host time per call on the GPU, with the python that has a CUDA Paddle
	$(PYTHON) -m benchmarks.gpu.host

clean:  ## remove what was built, .venv included
	rm -rf $(VENV) $(VENV)-torch build *.egg-info paddle_fused/_C.so paddle_fused/_build_info.py
