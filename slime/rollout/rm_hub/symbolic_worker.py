"""The child process of ``symbolic``: answers each line on standard input with one line.

A question is {"expression"} (is it zero?) or {"gold", "answer"} (does math-verify find them equal?).

The policy's output is never evaluated as Python: ``read_expression`` builds sympy nodes from a small grammar, and
sympy and math-verify use it to parse strings (``replace_sympys_reader``).  As a second barrier, the process cannot
use the network, start processes or write files (``slime.isolation.seccomp``).

Runs as a script or by ``python -c``, with the path of ``seccomp.py`` as argument.  Does not import slime, to start
fast.
"""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import sys
from collections.abc import Callable
from typing import Any

import sympy

MAX_LENGTH = 2000
"""Maximum characters of an expression, which also bounds its number of nodes."""
MAX_DEPTH = 40
MAX_EXPONENT = 10_000
MAX_BITS = 200_000
"""Maximum size of a power of two numbers."""
MAX_FACTORIAL = 2000

CONSTANTS = {"pi": sympy.pi, "oo": sympy.oo}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": sympy.Abs, "max": sympy.Max, "min": sympy.Min, "ln": sympy.log,
    **{
        name: getattr(sympy, name)
        for name in (
            "sqrt frac log exp re im floor ceiling sign sin cos tan cot sec csc asin acos atan sinh cosh tanh"
        ).split()
    },
}  # fmt: skip
WORDS = frozenset(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron rho sigma tau upsilon phi chi "
    "psi omega".split()
)
"""Greek letters by name.  Any other word is a product of its letters."""

# Letters and digits without "_": the first alternative takes "2e" as 2 and a letter, and "2e3" as a number.
_TOKEN = re.compile(
    r"[ \t]*(?:(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)(?P<imaginary>[jJ](?![0-9]))?"
    r"|(?P<word>[^\W\d_](?:[^\W\d_]|[0-9])*)|(?P<mark>\*\*|!!|[-+*/^!(),]))"
)
_PART = re.compile(r"[0-9]+|.")


class UnreadableError(ValueError):
    """The text is not an expression of the grammar, or exceeds a limit."""


def read_expression(text: str) -> Any:
    """Parse ``text`` in textbook notation into a sympy expression.

    ::

        sum     = product {("+" | "-") product}
        product = signed {["*" | "/"] signed}          "2x", "2(x + 1)", "pi r": products
        signed  = {"+" | "-"} power
        power   = factor [("^" | "**") signed]         -2^2 is -4; 2^3^2 is 2^9
        factor  = (number | letter | constant | "(" sum ")" | function ["^" signed] "(" sum {"," sum} ")") {"!"}

    Raises:
        UnreadableError: ``text`` does not parse, or is too long, too deep or too large.
    """
    if len(text) > MAX_LENGTH:
        raise UnreadableError(f"{len(text)} characters")
    reader = _Reader(_tokens(text))
    expression = reader.sum()
    if reader.next:
        raise UnreadableError(f"{reader.next!r} is left")
    return expression


def _tokens(text: str) -> list[Any]:
    """Split ``text`` into tokens: strings for operators and functions, sympy objects for numbers and symbols."""
    tokens: list[Any] = []
    position, text = 0, text.rstrip(" \t")
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise UnreadableError(f"{text[position]!r} at {position}")
        position = match.end()
        if match["number"]:
            tokens.append(_number(match["number"]))
            if match["imaginary"]:
                tokens.append(sympy.I)
        elif word := match["word"]:
            if word in FUNCTIONS:
                tokens.append(word)
            elif word in CONSTANTS or word in WORDS:
                tokens.append(CONSTANTS.get(word) or sympy.Symbol(word))
            else:
                parts = [_number(part) if part.isdecimal() else _letter(part) for part in _PART.findall(word)]
                tokens += ["(", *parts, ")"] if text.startswith("!", position) else parts
        else:
            tokens.append({"**": "^"}.get(match["mark"], match["mark"]))
    return tokens


def _letter(text: str) -> Any:
    if not text.isalpha():
        raise UnreadableError(f"{text!r}, which is not a letter")
    return sympy.Symbol(text)


def _number(text: str) -> Any:
    whole, _, exponent = text.lower().partition("e")
    if len(exponent) > 5 or abs(int(exponent or 0)) > MAX_EXPONENT:
        raise UnreadableError(f"the number {text}")
    return sympy.Integer(int(text)) if text.isdigit() else sympy.Float(text)


class _Reader:
    """Recursive-descent parser with one method per rule of the grammar."""

    def __init__(self, tokens: list[Any]) -> None:
        self._tokens = [*tokens, ""]
        self._position = self._depth = 0

    @property
    def next(self) -> Any:
        return self._tokens[self._position]

    def _take(self, *marks: str) -> str:
        """Consume and return the next token if it is one of ``marks``; else return an empty string."""
        token = self.next
        if not isinstance(token, str) or token not in marks:
            return ""
        self._position += 1
        return token

    def _expect(self, mark: str) -> None:
        if not self._take(mark):
            raise UnreadableError(f"{self.next!r} where {mark!r} is expected")

    def sum(self) -> Any:
        value = self._product()
        while sign := self._take("+", "-"):
            value = value + self._product() if sign == "+" else value - self._product()
        return value

    def _product(self) -> Any:
        value = self._signed()
        while True:
            if mark := self._take("*", "/"):
                value = value * self._signed() if mark == "*" else value / self._signed()
            elif not isinstance(self.next, str) or self.next == "(" or self.next in FUNCTIONS:
                value = value * self._power()
            else:
                return value

    def _signed(self) -> Any:
        is_negative = False
        while sign := self._take("+", "-"):
            is_negative ^= sign == "-"
        value = self._power()
        return -value if is_negative else value

    def _power(self) -> Any:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise UnreadableError(f"deeper than {MAX_DEPTH}")
        base = self._factor()
        value = _power(base, self._signed()) if self._take("^") else base
        self._depth -= 1
        return value

    def _factor(self) -> Any:
        if self._take("("):
            value = self.sum()
            self._expect(")")
        elif name := self._take(*FUNCTIONS):
            exponent = self._signed() if self._take("^") else None
            self._expect("(")
            arguments = [self.sum()]
            while self._take(","):
                arguments.append(self.sum())
            self._expect(")")
            value = FUNCTIONS[name](*arguments)
            value = value if exponent is None else _power(value, exponent)
        elif isinstance(self.next, str):
            raise UnreadableError(f"{self.next!r} where a factor is expected")
        else:
            value = self.next
            self._position += 1
        while mark := self._take("!", "!!"):
            value = _factorial(value, mark)
        return value


def _power(base: Any, exponent: Any) -> Any:
    if exponent.is_Number and exponent.is_finite:
        size = abs(exponent)
        if size > MAX_EXPONENT:
            raise UnreadableError(f"the exponent {exponent}")
        if base.is_Rational and max(abs(base.p), base.q).bit_length() * size > MAX_BITS:
            raise UnreadableError(f"a power of more than {MAX_BITS} bits")
    return base**exponent


def _factorial(value: Any, mark: str) -> Any:
    if value.is_number and not abs(value) <= MAX_FACTORIAL:
        raise UnreadableError("a factorial of more")
    return sympy.factorial(value) if mark == "!" else sympy.factorial2(value)


def replace_sympys_reader() -> None:
    """Make sympy and math-verify parse strings with this grammar: sympy's own parser evaluates them as Python.

    math-verify passes numbers to sympy as text.  The calls below trigger sympy's lazy imports before the parser is
    replaced, because sympy creates its units from strings.
    """
    from sympy.parsing import sympy_parser

    def read(text: str, *options: Any, **more: Any) -> Any:
        return read_expression(text)

    def refuse(*code: Any) -> Any:
        raise UnreadableError("sympy evaluates no text here")

    is_zero("sin(x)^2-x")
    if importlib.util.find_spec("math_verify") is not None:
        from math_verify import parser

        is_same("$x^2$", "$\\sin x$")
        parser.parse_expr = read
    sympy_parser.parse_expr, sympy_parser.eval_expr = read, refuse


def is_zero(expression: str) -> bool:
    """Return True if sympy simplifies the expression to 0; False otherwise or if it is unreadable."""
    try:
        return bool(sympy.simplify(read_expression(expression)) == 0)
    except Exception as error:  # process boundary: sympy may raise anything on odd input
        print(f"{expression!a}: {type(error).__name__}: {error}", file=sys.stderr)
        return False


def is_same(gold: str, answer: str) -> bool:
    """Return True if math-verify, which must be installed, finds ``answer`` equal to ``gold``; False if unreadable."""
    from math_verify import parse, verify

    try:
        # math-verify's own time limits need signals in the main thread.
        parsed = [parse(text, parsing_timeout=None) for text in (gold, answer)]
        return bool(all(parsed) and verify(*parsed, timeout_seconds=None))
    except Exception as error:  # process boundary: sympy may raise anything on odd input
        print(f"{answer!a}: {type(error).__name__}: {error}", file=sys.stderr)
        return False


def main() -> None:
    """Answer until the parent closes the pipe."""
    replace_sympys_reader()
    runpy.run_path(sys.argv[1])["install"](only_threads=True, only_reads=True)
    for line in sys.stdin:
        question = json.loads(line)
        if "expression" in question:
            answer = {"is_zero": is_zero(question["expression"])}
        else:
            answer = {"is_same": is_same(question["gold"], question["answer"])}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
