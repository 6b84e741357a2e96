# One virtual environment in .venv; each target installs what it needs into it once.
# pip's own settings (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, ...) decide where packages come from. Where both a CPU
# and a CUDA build of the pinned torch are on offer, pip prefers the one with a local version (2.13.0+cpu).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_OPTIONS := --no-compile -c constraints.txt  # Python compiles what it imports; all of torch takes it 20 s
INPUTS := pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*.[ch] csrc/cpu/*.[ch])
EMULATED := $(filter-out tests/test_bias_grad.py tests/test_columns_cuda.py, \
    $(shell grep -lE "import.*emulator|tests\.test_kernels" tests/test_*.py))

# A path in place of the finder that an editable install leaves, which would go before PYTHONPATH: tests compare trees.
define PLAIN_PATH
import pathlib, sysconfig
for path in pathlib.Path(sysconfig.get_path("purelib")).glob("*editable*gemmconv.pth"):
    path.write_text("$(CURDIR)\n")
endef
export PLAIN_PATH

.DEFAULT_GOAL := help
.PHONY: help demo bench docs executor test test-kernels test-others test-slow lint dev clean

help:
	@echo "make demo    compare the algorithms on the demo layers; table, and charts in gemmconv-demo/"
	@echo "make bench   measure every algorithm beside torch's settings: all suites on a GPU, a few small layers on a CPU"
	@echo "make docs    build the documentation into build/site; a link that leads nowhere is an error"
	@echo "make executor  build the extension in C in place, for use without an install"
	@echo "make test    run the tests but slow ones, in two processes; those marked gpu are skipped without a CUDA device"
	@echo "make test-slow  the rest: all runs of kernels and mistakes in them, every variant for every architecture"
	@echo "make lint    ruff check, ruff format --check, mypy"
	@echo "make dev     install everything a developer needs into $(VENV)"
	@echo "make clean   remove $(VENV) and all caches and build outputs"
	@echo
	@echo "PYTHON=python3.12 picks the interpreter of a new $(VENV). For a CPU-only torch, point"
	@echo "PIP_EXTRA_INDEX_URL at the package index of torch's CPU builds."

demo: $(VENV)/.installed-demo
	$(BIN)/python -m benchmarks.algorithms

bench: $(VENV)/.installed-demo
	$(BIN)/python -m benchmarks.compare --charts

docs: $(VENV)/.installed-docs
	$(BIN)/mkdocs build --strict

# For use without an install; `pip install` builds the same by CMakeLists.txt.
executor:
	$(CC) -std=c11 -O3 -ffp-contract=fast -Wall -Wextra -Wno-unused-parameter -fPIC -fvisibility=hidden -shared -I"$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')" \
	    csrc/*.c csrc/cpu/*.c -o gemmconv/_extension.abi3.so -ldl

# In two processes that take as long, each with the output of its own in one piece: most kernels in the emulator, and all
# else.
test:
	+@$(MAKE) --no-print-directory -j2 --output-sync test-kernels test-others

test-kernels: $(VENV)/.installed-test
	$(BIN)/python -m pytest -q --tb=short $(EMULATED)

test-others: $(VENV)/.installed-test
	$(BIN)/python -m pytest -q --tb=short $(addprefix --ignore=,$(EMULATED))

test-slow: $(VENV)/.installed-test
	$(BIN)/python -m pytest -q --tb=short -m slow

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

dev: $(VENV)/.installed-dev

clean:
	rm -rf $(VENV) build dist gemmconv-demo gemmconv-examples .mypy_cache .pytest_cache .ruff_cache .hypothesis gemmconv/_extension*.so
	find benchmarks examples gemmconv tests -type d -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The tests cover the demo too, so they take both extras.
$(VENV)/.installed-demo: EXTRAS := demo
$(VENV)/.installed-test: EXTRAS := demo,test
$(VENV)/.installed-dev: EXTRAS := dev
$(VENV)/.installed-docs: EXTRAS := docs
$(VENV)/.installed-%: $(INPUTS) | $(BIN)/python
	$(BIN)/pip install $(PIP_OPTIONS) -e ".[$(EXTRAS)]"
	@if nvidia-smi >/dev/null 2>&1; then \
	    cuda=$$($(BIN)/python -c 'import torch; print((torch.version.cuda or "none").split(".")[0])'); \
	    case $$cuda in \
	        12|13) $(BIN)/pip install $(PIP_OPTIONS) -e ".[$(EXTRAS),cuda$$cuda]" ;; \
	        *) echo "note: a GPU is present, but torch is built without CUDA 12 or 13; no CUDA extra is installed" ;; \
	    esac; \
	fi
	@$(BIN)/python -c "$$PLAIN_PATH"
	@touch $@
