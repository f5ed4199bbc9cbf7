"""The child process of ``symbolic``: reads expressions line by line, answers whether each is zero.

Run as a script with the time limit in seconds.  Imports sympy and nothing of slime, so that it starts fast.  A
question that takes too long or too much memory ends the process: the parent sees that and goes on with a new one.
"""

from __future__ import annotations

import json
import resource
import signal
import sys

MAX_MEMORY_BYTES = 2 << 30


def is_zero(expression: str) -> bool:
    """True when sympy simplifies the expression to 0; False when it cannot be read."""
    from sympy import simplify
    from sympy.parsing import sympy_parser

    transformations = (
        *sympy_parser.standard_transformations,
        sympy_parser.implicit_multiplication_application,
    )
    try:
        parsed = sympy_parser.parse_expr(expression.replace("^", "**"), transformations=transformations)
        return bool(simplify(parsed) == 0)
    except Exception as error:  # the edge of a process: sympy raises anything at all on odd input
        print(f"{expression!r}: {type(error).__name__}: {error}", file=sys.stderr)
        return False


def main() -> None:
    """Answer until the parent closes the pipe."""
    limit_s = float(sys.argv[1])
    del sys.path[0]  # this file's folder, whose modules are no top-level packages
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    is_zero("x-x")  # imports sympy before the first clock starts
    for line in sys.stdin:
        # No handler: the alarm's default action ends the process even inside C code.
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        answer = is_zero(json.loads(line)["expression"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps({"is_zero": answer}), flush=True)


if __name__ == "__main__":
    main()
