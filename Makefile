# Two commands matter: `make run` and `make test`. Each does all the set-up (a virtual environment in .venv) the first
# time; a stamp file makes the second call instant. Another interpreter: `make PYTHON=/path/to/python3.12 run`.

VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
CONFIG ?= quickstart
PYTEST ?=
MODELS := $(addprefix exchange_,deepseek_v3 gpt_oss_120b kimi_k2 mixtral_8x22b qwen3_235b)
FULL   := --set 'matrix.shape.tokens=[1, 128, 4096, 8192]' --set 'matrix.routing.kind=[uniform, zipf]' --set routing.alpha=1.2
FP8    := --set 'matrix.exchange.backend=[fused, staged, row_push]' --set exchange.wire=float8_e4m3 --set exchange.output=raw
NEWEST := import sys; sys.exit(sys.version_info < (3, 11))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup run test check lint types unit perf soak sanitize exchange-stamped exchange-full bench-exchange fmt hooks wheel clean distclean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /  make \1\t/' | expand -t 24

setup: $(STAMP) ## create .venv and install everything into it

run: $(STAMP) ## set up, then run configs/quickstart.yaml (another: CONFIG=host_exchange)
	$(BIN)/raymoe run $(CONFIG)

test: check unit ## set up, then ruff, mypy and every test

check: lint types ## ruff and mypy only

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP) ## the tests only (a part: PYTEST="tests/unit -k plan")
	$(BIN)/pytest $(PYTEST)

perf: $(STAMP) ## the speeds that the docs promise, as ratios (wants an idle machine)
	$(BIN)/pytest -m perf tests/perf

soak: $(STAMP) ## ten thousand replays of every exchange by ranks that are late (GPUs), the explorer's largest cases
	$(BIN)/pytest -m soak tests/gpu tests/unit

# Each case runs tens of times slower under these tools; every run has a deadline of its own, in the test.
sanitize: $(STAMP) ## exchanges and copies under compute-sanitizer: memcheck, synccheck, racecheck (one GPU)
	$(BIN)/pytest -m sanitize -o faulthandler_timeout=0 tests/gpu/test_sanitizer.py

exchange-stamped: $(STAMP) ## the exchange's tests on GPUs, every slot stamped with its run, which who reads it checks
	RAYMOE_STAMPS=1 $(BIN)/pytest -m "gpu and not soak and not perf" tests/gpu/test_exchange_gpu.py

exchange-full: $(STAMP) ## the shape of every model, up to 8192 tokens, skewed and in fp8 (four GPUs)
	@set -e; for model in $(MODELS); do \
	  echo $${model}_full >&2; $(BIN)/raymoe run $$model --set name=$${model}_full $(FULL); \
	  echo $${model}_fp8 >&2; $(BIN)/raymoe run $$model --set name=$${model}_fp8 $(FULL) $(FP8); \
	done

bench-exchange: $(STAMP) ## the benchmark of the exchange, in bfloat16 and in fp8 (four GPUs)
	$(BIN)/raymoe run bench_exchange
	$(BIN)/raymoe run bench_exchange_fp8

fmt: $(STAMP) ## rewrite the sources as ruff wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

hooks: $(STAMP) ## run ruff and mypy at every git commit
	$(BIN)/pre-commit install

wheel: $(STAMP) ## build dist/raymoe-*.whl
	$(BIN)/python -m pip wheel --no-deps --no-build-isolation --wheel-dir dist .

clean: ## remove caches and builds; .venv and runs/ stay
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## clean, and .venv too
	rm -rf $(VENV)

# `test` runs its two halves in order even under -j, so that the tests' summary is the last thing printed.
unit: | $(if $(filter test,$(MAKECMDGOALS)),check)

# An existing .venv is kept when its interpreter works and is new enough, and made anew when not.
$(STAMP): pyproject.toml constraints.txt
	@set -e; \
	if [ -x $(BIN)/python ] && $(BIN)/python -c '$(NEWEST)' 2>/dev/null && $(BIN)/python -m pip --version >/dev/null 2>&1; then :; else \
	  python=; \
	  for each in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11); do \
	    if "$$each" -c '$(NEWEST)' >/dev/null 2>&1; then python=$$each; break; fi; \
	  done; \
	  if [ -z "$$python" ]; then \
	    found=$$($(or $(PYTHON),python3) --version 2>&1 || true); \
	    echo "raymoe needs Python 3.11 or newer, found: $${found:-none}; install one, or name it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; \
	  fi; \
	  if ! "$$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then \
	    echo "$$python cannot make a virtual environment: it has no ensurepip; install it (Debian and Ubuntu: the package python3-venv), or name another Python: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; \
	  fi; \
	  "$$python" -m venv --clear $(VENV); \
	fi
	@echo "installing into $(VENV); the first time takes minutes" >&2
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,examples]'
	@touch $@
