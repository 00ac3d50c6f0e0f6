# The two main commands are `make run` and `make test`. The first call creates a virtual environment in .venv. Later
# calls find its stamp file and skip that. To choose an interpreter: `make PYTHON=/path/to/python3.12 run`.

VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
CONFIG ?= quickstart
PYTEST ?=
MODELS := $(addprefix exchange_,deepseek_v3 gpt_oss_120b kimi_k2 mixtral_8x22b qwen3_235b)
FULL   := --set 'matrix.shape.tokens=[1, 128, 4096, 8192]' --set 'matrix.routing.kind=[uniform, zipf]' --set routing.alpha=1.2
FP8    := --set 'matrix.exchange.backend=[fused, staged, row_push]' --set exchange.wire=float8_e4m3 --set exchange.output=raw
THOROUGH := "thorough and not soak and not perf and not sanitize"
NEWEST := import sys; sys.exit(sys.version_info < (3, 11))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup run test test-all hosts check lint types unit durations figures tables perf soak faults faults-gpu soak-faults sanitize exchange-stamped exchange-full bench-exchange fmt hooks site wheel clean distclean

help: ## list these targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /  make \1\t/' | expand -t 24

setup: $(STAMP) ## create .venv and install everything in it

run: $(STAMP) ## set up, then run quickstart (another config: CONFIG=host_exchange)
	$(BIN)/raymoe run $(CONFIG)

test: check unit ## set up, then run ruff, mypy and the tests that guard daily changes

check: lint types ## run ruff and mypy only

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# Two halves that take about the same time run side by side, because tests of Ray and of worlds wait a lot. Their output
# comes last. A third part beside them would make `make test` shorter, and tests with deadlines of seconds fail on two
# slow cores.
SECOND := tests/gang $(addprefix tests/unit/,config docs gang house integrations memory net report workload)
define HALVES
@log=$$(mktemp) && { $(BIN)/pytest $(1) $(SECOND) >$$log 2>&1 & } && gang=$$! && trap "kill $$gang; exit 130" INT TERM && \
  { $(BIN)/pytest $(1) raymoe tests/gpu tests/unit $(addprefix --ignore=,$(SECOND)); others=$$?; \
    wait $$gang; code=$$?; cat $$log; rm -f $$log; [ $$others$$code = 00 ]; }
endef

unit: $(STAMP) ## run the tests of `make test` only (some of them: PYTEST="tests/unit -k plan")
ifeq ($(PYTEST),)
	$(call HALVES)
else
	$(BIN)/pytest $(PYTEST)
endif

test-all: $(STAMP) ## run the tests that `make test` leaves out, and no other ones: every case of every rule
	$(call HALVES,-m $(THOROUGH))

hosts: $(STAMP) ## run raymoe inside the frameworks of docs/frameworks.md, which are installed into .hosts/ (20 minutes and more)
	$(BIN)/pytest -m $(THOROUGH) -o faulthandler_timeout=1800 tests/hosts

durations: $(STAMP) ## time every test file of `make test` and `make test-all` (needs an idle machine)
	rm -f benchmarks/test_durations.new
	PYTEST_ADDOPTS="-p tests.unit.house.durations" RAYMOE_DURATIONS=$(CURDIR)/benchmarks/test_durations.new $(MAKE) unit
	PYTEST_ADDOPTS="-p tests.unit.house.durations" RAYMOE_DURATIONS=$(CURDIR)/benchmarks/test_durations.new $(MAKE) test-all
	$(BIN)/python -m tests.unit.house.durations benchmarks/test_durations.new >benchmarks/test_durations_cpu.txt
	rm benchmarks/test_durations.new

figures: $(STAMP) ## draw the measured figures and pages of docs/figures/ again, out of benchmarks/ (needs Chromium)
	$(BIN)/python -m tests.unit.docs.measured_figures
	$(BIN)/python -m tests.unit.docs.report_pictures

tables: $(STAMP) ## write the measured tables of the pages again, out of benchmarks/
	$(BIN)/python -m tests.unit.docs.write_tables

perf: $(STAMP) ## check the speeds that the docs promise, as ratios (needs an idle machine)
	$(BIN)/pytest -m perf tests/perf

soak: $(STAMP) ## run long tests: 10,000 replays of every exchange with delayed ranks (GPUs), long faults, the explorer's largest cases
	$(BIN)/pytest -m soak tests/gpu tests/unit tests/gang

# Lines of a run that failed are not kept, so that the page shows whole runs only.
faults: $(STAMP) ## measure every fault of docs/evidence/faults.md, and write its tables (needs an idle machine)
	rm -f benchmarks/faults_cpu.new
	RAYMOE_FAULTS=$(CURDIR)/benchmarks/faults_cpu.new $(BIN)/pytest -m "fault and not soak" tests/gang
	mv benchmarks/faults_cpu.new benchmarks/faults_cpu.jsonl
	$(BIN)/python -m tests.gang.fault_table

faults-gpu: $(STAMP) ## measure the faults of ranks on one or two GPUs in the same way (needs idle GPUs)
	rm -f benchmarks/faults_gpu.new
	RAYMOE_FAULTS=$(CURDIR)/benchmarks/faults_gpu.new $(BIN)/pytest -m fault tests/gpu/test_faults_gpu.py
	mv benchmarks/faults_gpu.new benchmarks/faults_gpu.jsonl
	$(BIN)/python -m tests.gang.fault_table

soak-faults: $(STAMP) ## measure the long faults in the same way (a part of `make soak`)
	rm -f benchmarks/faults_soak.new
	RAYMOE_FAULTS=$(CURDIR)/benchmarks/faults_soak.new $(BIN)/pytest -m "fault and soak" tests/gang
	mv benchmarks/faults_soak.new benchmarks/faults_soak.jsonl
	$(BIN)/python -m tests.gang.fault_table

# faulthandler_timeout is off, because these tools slow a case tens of times. The test gives each run its own deadline.
sanitize: $(STAMP) ## run exchanges and copies under compute-sanitizer: memcheck, synccheck, racecheck (one GPU)
	$(BIN)/pytest -m sanitize -o faulthandler_timeout=0 tests/gpu/test_sanitizer.py

exchange-stamped: $(STAMP) ## run the exchange's tests on GPUs; each slot carries its epoch, and every reader checks it
	RAYMOE_STAMPS=1 $(BIN)/pytest -m "gpu and not soak and not perf" tests/gpu/test_exchange_gpu.py

exchange-full: $(STAMP) ## run every model's shape up to 8192 tokens, uniform and skewed, bfloat16 and fp8 (four GPUs)
	@set -e; for model in $(MODELS); do \
	  echo $${model}_full >&2; $(BIN)/raymoe run $$model --set name=$${model}_full $(FULL); \
	  echo $${model}_fp8 >&2; $(BIN)/raymoe run $$model --set name=$${model}_fp8 $(FULL) $(FP8); \
	done

bench-exchange: $(STAMP) ## run the benchmark of the exchange, in bfloat16 and fp8 (four GPUs)
	$(BIN)/raymoe run bench_exchange
	$(BIN)/raymoe run bench_exchange_fp8

fmt: $(STAMP) ## fix and format the sources with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

hooks: $(STAMP) ## install git hooks that run ruff and mypy at every commit
	$(BIN)/pre-commit install

site: $(STAMP) ## build the documentation as a site in build/site/, which needs no network to read
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open build/site/index.html"

wheel: $(STAMP) ## build dist/raymoe-*.whl
	$(BIN)/python -m pip wheel --no-deps --no-build-isolation --wheel-dir dist .

clean: ## remove caches and builds; .venv and runs/ stay
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## clean, and remove .venv and .hosts too
	rm -rf $(VENV) .hosts

# Under -j too, `test` runs `check` before `unit`, so that the tests' summary is printed last.
unit: | $(if $(filter test,$(MAKECMDGOALS)),check)

# An existing .venv is kept if its interpreter works and is new enough. Otherwise it is created again.
$(STAMP): pyproject.toml constraints.txt
	@set -e; \
	if [ -x $(BIN)/python ] && $(BIN)/python -c '$(NEWEST)' 2>/dev/null && $(BIN)/python -m pip --version >/dev/null 2>&1; then :; else \
	  python=; \
	  for each in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11); do \
	    if "$$each" -c '$(NEWEST)' >/dev/null 2>&1; then python=$$each; break; fi; \
	  done; \
	  if [ -z "$$python" ]; then \
	    found=$$($(or $(PYTHON),python3) --version 2>&1 || true); \
	    echo "raymoe needs Python 3.11 or newer, found: $${found:-none}; install it, or name it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; \
	  fi; \
	  if ! "$$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then \
	    echo "$$python cannot make a virtual environment: it has no ensurepip; install it (Debian and Ubuntu: the package python3-venv), or name another Python: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; \
	  fi; \
	  "$$python" -m venv --clear $(VENV); \
	fi
	@echo "installing into $(VENV); the first time takes minutes" >&2
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,docs,examples,storage]'
	@touch $@
