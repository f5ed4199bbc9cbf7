# The two commands: `make demo` and `make test`.  Each makes .venv first when it is missing or its pins have changed.

.PHONY: demo test matrix install check

demo: install
	@scripts/demo.sh

test: install
	@OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q -m "not gpu" --durations=10 tests

# Every model family against every check and every parallel layout, with the numbers.
matrix: install
	@OMP_NUM_THREADS=1 .venv/bin/python -m tests.matrix

check: install
	@scripts/check

install:
	@scripts/install.sh
