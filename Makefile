# The two commands: `make demo` and `make test`.  Each makes .venv first when it is missing or its pins have changed.

.PHONY: demo test faults matrix algorithms push-matrix install check

demo: install
	@scripts/demo.sh

test: install
	@OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q -m "not gpu and not faults" --durations=10 tests

# Engines and routers of real jobs, killed in the middle of a rollout: minutes each, on a machine with nothing else to do.
faults: install
	@OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q -m "faults and not gpu" tests/e2e

# Every model family against every check and every parallel layout, with the numbers.
matrix: install
	@OMP_NUM_THREADS=1 .venv/bin/python -m tests.matrix

# Every estimator, loss and correction against its plain reference in every layout, and every known bug put back into
# the code, with the numbers; `ARGS=--end-to-end` then runs the tiny task's real job with each algorithm.
algorithms: install
	@OMP_NUM_THREADS=1 .venv/bin/python -m tests.algorithms $(ARGS)

# Every way to push weights into SGLang's models, with the digests: mode x quantisation x trainer layout x engine size.
push-matrix: install
	@OMP_NUM_THREADS=1 .venv/bin/python -m tests.push_matrix

check: install
	@scripts/check

install:
	@scripts/install.sh
