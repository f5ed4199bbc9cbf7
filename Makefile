# The two commands: `make demo` and `make test`.  Each makes .venv first when it is missing or its pins have changed.
# What they compute on is what this machine has: `make demo DEVICE=cpu` and DEVICE=gpu say it instead, .venv included.
DEVICE ?= $(shell scripts/device.sh)

# A job starts a dozen Python processes: where the environment forbids bytecode (many images do), each would compile
# thousands of files.
export PYTHONDONTWRITEBYTECODE :=

# `make docs` builds the site of docs/ into site/.
.PHONY: docs test-dist demo demo-real real-checks test faults simulate chaos matrix families algorithms push-matrix seeds golden golden-core install browser trackers check

demo: install
	@DEVICE=$(DEVICE) scripts/demo.sh

# A pretrained model on a task of reasoning-gym: 100 MB of packages, 23 minutes on two quiet cores; DEVICE=gpu for one GPU.
demo-real: install
	@DEVICE=$(DEVICE) scripts/demo_real.sh

# Two files of tests run at the same time: a real job starts on one core.  Files keep their order, the long ones first:
# tests of a real job (tests/conftest.py), several processes each (layouts, resumes, pushes), then the others.
WORKERS ?= 2
MARKS = not gpu and not faults and not real
PYTEST = OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q -m "$(MARKS)" --durations=10
test: MARKS += and not whole
test: install browser trackers
	@$(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(SUITE)

# The suite has these files of tests/dist, and nothing marked `whole`; all take longer than the suite.  Folders
# one by one, because pytest drops a file that is named beside a folder around it.
SUITE = tests/e2e $(DIST_IN_SUITE) $(filter-out tests/dist/ tests/e2e/ tests/real/ tests/__pycache__/,$(wildcard tests/*/))
DIST_IN_SUITE = $(addprefix tests/dist/test_,matrix.py train_step_layouts.py log_probs_tp.py) \
	$(addprefix tests/ext/fast_push/dist/test_,push_matrix.py shard_buckets.py draft_models.py)
test-dist: install
	@$(PYTEST) tests/dist/test_*.py tests/ext/*/dist/test_*.py tests/e2e/test_nodes_script.py tests/mutations/test_mutations.py

# Engines, routers and trainers of real jobs, killed in the middle of their work: minutes each, on a machine with nothing
# else to do.
faults: install
	@OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q -m "faults and not gpu" tests/e2e tests/ext/training_api

# The whole control plane in virtual time under schedules of faults: 100 000 take about two hours on two quiet cores.
# `python -m tests.simulator --bugs` puts bugs of the past back and looks for them.
SCHEDULES ?= 100000
SEED ?= 0
WORKERS ?= 2
simulate: install
	@OMP_NUM_THREADS=1 .venv/bin/python -m tests.simulator --schedules $(SCHEDULES) --seed $(SEED) --workers $(WORKERS)

# Seeded schedules of deaths against the real job: two to four minutes each.  N=20 schedules from SEED on, PARALLEL=1 at a
# time; DEVICE=gpu for trainers and engines on GPUs.
N ?= 20
PARALLEL ?= 1
chaos: install
	@OMP_NUM_THREADS=1 .venv/bin/python -m tests.e2e.chaos --schedules $(N) --seed $(SEED) --parallel $(PARALLEL) --device $(DEVICE)

# The recipes of the documents that the project was made from, in miniature, as whole jobs from conversion to resume: six
# minutes each on two quiet cores; DEVICE=gpu for two GPUs.  ARGS="--only NAME", --write-docs.
seeds: install
	@.venv/bin/python -m tests.seeds --device $(DEVICE) --parallel $(PARALLEL) $(ARGS)

# Five tiny jobs against recorded numbers, bit for bit: what a change of the structure must leave as it is.  A minute a
# job; ARGS="--only NAME", --write.  `scripts/gauges.py` measures the structure itself.
golden: install
	@.venv/bin/python -m tests.golden $(ARGS)

# The same by the core alone, in a copy of the repository whose slime/ext is empty.
golden-core: install
	@.venv/bin/python -m tests.golden --without-extensions --only grpo async ppo sft $(ARGS)

# The pretrained model of `make demo-real` in trainer, engine, converters and LoRA, with the numbers.
real-checks: install
	@UNTIL=task scripts/demo_real.sh
	@OMP_NUM_THREADS=2 .venv/bin/python -m pytest -q -s -m real tests/real/test_*.py

# Every model family against every check and every parallel layout, with the numbers.
matrix: install
	@OMP_NUM_THREADS=1 .venv/bin/python -m tests.matrix

# Every model family: loaded, trained for a step, exported, and pushed into SGLang's model where a CPU can build it.
families: install
	@OMP_NUM_THREADS=1 .venv/bin/python -m tests.matrix --check step "round trip" "live export"
	@OMP_NUM_THREADS=1 .venv/bin/python -m tests.push_matrix --full --layout one --mode colocated --quantization bf16 --engine-tp 1

# Every estimator, loss and correction against its plain reference in every layout, and every known bug put back into
# the code, with the numbers; `ARGS=--end-to-end` then runs the tiny task's real job with each algorithm.
algorithms: install
	@OMP_NUM_THREADS=1 .venv/bin/python -m tests.algorithms $(ARGS)

# Every way to push weights into SGLang's models, with the digests: mode x quantisation x trainer layout x engine size.
push-matrix: install
	@OMP_NUM_THREADS=1 .venv/bin/python -m tests.push_matrix

docs: install
	@.venv/bin/python scripts/make_docs.py
	@NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict --clean

check: install browser
	@scripts/check

install:
	@scripts/install.sh

# For tests of the report; they are skipped where it cannot be had.
browser: install
	@scripts/browser.sh || true

# For tests of trackers that no lock has; they are skipped where these cannot be had.
trackers: install
	@[ .venv/trackers -nt requirements/trackers.txt ] || { timeout 180 .venv/bin/python -m pip install --quiet --no-deps --upgrade \
		--target .venv/trackers -r requirements/trackers.txt && touch .venv/trackers; } || true
