# `make demo` and `make test` build their own virtual environment in .venv the first time.

# Threads that spin long while they wait slow small products tenfold where others share the cores; not to spin at all
# slows them on an idle machine.
export GOMP_SPINCOUNT ?= 20000

PYTHON ?= python3
PIP := -m pip --disable-pip-version-check install --quiet -c constraints-dev.txt
INSTALLED := .venv/.installed
WHEEL_INSTALLED := .venv-wheel/.installed
NEWEST_INSTALLED := .venv-newest/.installed

# A Python without ensurepip (Debian's without python3-venv) leaves half an environment behind: start over with virtualenv.
make_venv = $(PYTHON) -m venv --clear $(1) || { \
	rm -rf $(1) .boot && \
	$(PYTHON) -m pip --disable-pip-version-check install --quiet --target .boot virtualenv && \
	PYTHONPATH=.boot $(PYTHON) -m virtualenv --quiet $(1); } || { \
	echo "cannot make a virtual environment: install python3-venv or python3-pip, or name another Python: make PYTHON=..."; \
	exit 1; }

.PHONY: demo test setup lint interpret-test newest-test compile-all gpu-test gpu-smoke wheel-test clean
.NOTPARALLEL:

demo: $(INSTALLED)
	.venv/bin/onchip demo

test: lint wheel-test interpret-test newest-test
	.venv/bin/python -m pytest -m "not gpu" -n 2

setup: $(INSTALLED)

lint: $(INSTALLED)
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy

# The contract on the Triton kernels without a GPU: interpreted, on short problems.
interpret-test: $(INSTALLED)
	TRITON_INTERPRET=1 .venv/bin/python -m pytest tests/contract --schedule triton -n 2 \
		-W "ignore::DeprecationWarning:triton.runtime.interpreter"

# The Hopper kernels with a newer Triton, some of whose names in Gluon differ.
newest-test: $(INSTALLED) $(NEWEST_INSTALLED)
	PYTHONPATH=.venv-newest .venv/bin/python -m pytest tests/compile/test_hopper.py tests/compile/test_hopper_backward.py tests/compile/test_launcher.py -n 2

# Every Triton kernel for every head dim, dtype, target and kind of problem, without a GPU: some 40 minutes, the first time.
compile-all: $(INSTALLED)
	.venv/bin/python -m tests.compile.everything

# With the Python, torch, pytest, pytest-xdist and hypothesis that the GPU machine already has.
WORKERS ?= 15
GPU_PYTEST = PYTHONPATH=src $(PYTHON) -m pytest -n $(WORKERS) --dist loadgroup
RECORDS ?= .
SCHEDULES ?= triton hopper chosen
GPU_CONTRACT = $(GPU_PYTEST) tests/contract --device cuda $(addprefix --schedule ,$(SCHEDULES))

# Some 8 minutes on 15 cores; with SCHEDULES="triton hopper chosen tiled dense" longer. The contract on the device holds what
# test_covering_problems of tests/gpu asks.
gpu-test:
	failed=0; \
	$(GPU_CONTRACT) --record $(RECORDS)/tests-contract.json || failed=1; \
	$(GPU_PYTEST) -m gpu --deselect tests/gpu/test_schedules.py::test_covering_problems \
		--record $(RECORDS)/tests-gpu.json || failed=1; \
	exit $$failed

gpu-smoke:
	$(GPU_CONTRACT) -m smoke --record $(RECORDS)/tests-smoke.json

# The built wheel in an environment that holds nothing but what the wheel asks for.
wheel-test: $(INSTALLED) $(WHEEL_INSTALLED)
	rm -rf dist
	.venv/bin/python -m build --wheel --quiet
	.venv-wheel/bin/python $(PIP) --force-reinstall --no-deps dist/onchip-*.whl
	.venv-wheel/bin/python $(PIP) dist/onchip-*.whl
	.venv-wheel/bin/python -m pip --disable-pip-version-check check
	.venv-wheel/bin/python -I -W "ignore:Failed to initialize NumPy" .ci/check_wheel.py

clean:
	rm -rf .venv .venv-wheel .venv-newest .boot build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache demo.png
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first and alone, so that nothing that needs a torch can choose another build of it.
$(INSTALLED): pyproject.toml constraints-dev.txt
	@test -x .venv/bin/python -a -x .venv/bin/pip || $(call make_venv,.venv)
	.venv/bin/python $(PIP) torch==2.13.0
	.venv/bin/python $(PIP) -e '.[dev]'
	touch $@

$(WHEEL_INSTALLED): constraints-dev.txt
	@$(call make_venv,.venv-wheel)
	.venv-wheel/bin/python $(PIP) torch==2.13.0
	touch $@

$(NEWEST_INSTALLED): constraints-newest.txt $(INSTALLED)
	rm -rf .venv-newest
	.venv/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --target .venv-newest -r constraints-newest.txt
	touch $@
