"""The child process of ``symbolic``: reads questions line by line, answers each with a line.

A question is {"expression"} (is it zero?) or {"gold", "answer"} (does math-verify call them equal?).

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
    """Return True when sympy simplifies the expression to 0; False when it cannot be read."""
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


def is_same(gold: str, answer: str) -> bool:
    """Return True when math-verify, which must be installed, finds the gold answer in ``answer``; False when
    unreadable.
    """
    from math_verify import parse, verify

    try:
        # No time limits of its own: they need signals of the main thread, which ours uses.
        parsed = [parse(text, parsing_timeout=None) for text in (gold, answer)]
        return bool(all(parsed) and verify(*parsed, timeout_seconds=None))
    except Exception as error:  # the edge of a process: sympy raises anything at all on odd input
        print(f"{answer!r}: {type(error).__name__}: {error}", file=sys.stderr)
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
        question = json.loads(line)
        if "expression" in question:
            answer = {"is_zero": is_zero(question["expression"])}
        else:
            answer = {"is_same": is_same(question["gold"], question["answer"])}
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
