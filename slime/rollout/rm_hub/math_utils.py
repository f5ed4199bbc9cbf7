r"""Is the boxed answer of a response the right one?  Used by ``--rm-type math`` and ``deepscaler``.

Two normal forms are tried.  The string form (``mathd_normalize_answer``, of Hendrycks' MATH data set) evens out
spelling: ``\dfrac12``, ``\frac{1}{2}``, ``0.5`` and ``1/2`` become one.  The symbolic form strips units and LaTeX, and
lets sympy, in a process of its own with a time limit, decide whether two expressions are equal.
Source: MATH, arXiv:2103.03874; the PRM800K grader, arXiv:2305.20050.
"""

from __future__ import annotations

import importlib.util
import math
import re
from typing import Any

from slime.rollout.rm_hub.symbolic import is_same_by_math_verify, is_zero
from slime.utils.errors import ConfigError

MAX_ANSWER_LENGTH = 20_000
"""A box or a label with more characters is none."""
MAX_FORM_LENGTH = 2000
"""Longer answers have no symbolic form: only the string form is compared."""
MAX_SYMBOLIC_LENGTH = 512
"""Longer expressions are not handed to sympy."""
MAX_INTEGER_LENGTH = 1000

# ------------------------------------------------------------ the boxed answer


def last_boxed_only_string(string: str) -> str | None:
    r"""Return the last ``\boxed{...}`` (else ``\fbox{...}``) of a text with its braces balanced; None without one that
    ends within ``MAX_ANSWER_LENGTH`` characters.
    """
    start = string.rfind("\\boxed")
    if start < 0:
        start = string.rfind("\\fbox")
    if start < 0:
        return None
    depth = 0
    for position in range(start, min(len(string), start + MAX_ANSWER_LENGTH)):
        if string[position] == "{":
            depth += 1
        elif string[position] == "}":
            depth -= 1
            if depth == 0:
                return string[start : position + 1]
    return None


def remove_boxed(text: str | None) -> str | None:
    r"""Return the text between the braces of ``\boxed{...}``; None when the text has another form."""
    prefix = "\\boxed{"
    if text is None or not text.startswith(prefix) or not text.endswith("}"):
        return None
    return text[len(prefix) : -1]


def extract_boxed_answer(solution: str) -> str | None:
    """Return the content of the last box of a solution; None without one."""
    return remove_boxed(last_boxed_only_string(solution))


def extract_answer(passage: str) -> str | None:
    """Return the content of the last box of a passage; None when the passage has no box or is empty."""
    return extract_boxed_answer(passage) if passage and "\\boxed" in passage else None


# ------------------------------------------------------------ the string form

_TEXT_ONLY = re.compile(r"^\\text\{(.+?)\}$")
_MATHD_REMOVE = ("\n", "\\!", "\\left", "\\right", "^{\\circ}", "^\\circ", "\\$")
_ONE_ARGUMENT = r"[^{}\\\s]"


def mathd_normalize_answer(answer: str | None) -> str | None:
    r"""Normalise the spelling: no units, no spaces, ``1/2`` and ``0.5`` as ``\frac{1}{2}``."""
    if answer is None:
        return None
    text = _unwrap_text(answer.strip())
    text = text.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = text.replace("tfrac", "frac").replace("dfrac", "frac")
    for piece in _MATHD_REMOVE:
        text = text.replace(piece, "")
    text = text.split("\\text{ ", 1)[0]
    text = text.replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    if text.startswith("."):
        text = "0" + text
    left, equals, right = text.partition("=")
    if equals and "=" not in right and len(left) <= 2:
        text = right
    text = re.sub(r"\\sqrt\s*(\w)", r"\\sqrt{\1}", text)
    text = text.replace(" ", "")
    text = re.sub(rf"\\frac({_ONE_ARGUMENT})({_ONE_ARGUMENT})", r"\\frac{\1}{\2}", text)
    text = re.sub(rf"\\frac({_ONE_ARGUMENT})\{{", r"\\frac{\1}{", text)
    if text == "0.5":
        text = "\\frac{1}{2}"
    return re.sub(r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}", text)


def grade_answer_mathd(given_answer: str, ground_truth: str) -> bool:
    """Return True when the two answers have the same string form."""
    return mathd_normalize_answer(ground_truth) == mathd_normalize_answer(given_answer)


def _unwrap_text(text: str) -> str:
    match = _TEXT_ONLY.match(text)
    return match.group(1).strip() if match else text


# ------------------------------------------------------------ the symbolic form

_UNITS = (
    "degree cm centimeter meter mile second minute hour day week month year foot feet inch yard".split()
)  # matched in this order; each with plural and exponent
_FRACTION = re.compile(r"^-?\d+\.?/0*[1-9]\d*\.?$")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d\d\d(?!\d))")
_MIXED_NUMBER = re.compile(r"(\d) +(\d)")
_REFUSED = re.compile(r"\^\{|\^\(|\^\d+\^|\^\d\d|[_'\"\\;:]")


def _symbolic_form(answer: str) -> str:
    """Return plain text that sympy can read: no units, no LaTeX, no spaces."""
    text = _unwrap_text(answer)
    text = re.sub(r"\\?[%$]", "", text)
    text = text.replace(" or ", " , ").replace(" and ", " , ")
    for word, power in (("million", 6), ("billion", 9), ("trillion", 12)):
        text = text.replace(word, f"*10^{power}")
    for unit in _UNITS:
        text = re.sub(rf"{unit}(es)?(s)? *(\^[0-9]+)?", "", text)
    text = re.sub(r"\^ *\\circ", "", text)
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    text = re.sub(r",\\! *", "", text)
    text = _as_integer(text.strip()) or text
    if "\\" in text:
        from slime.rollout.rm_hub.latex import latex_to_text

        text = latex_to_text(text)
    text = re.sub(r"- *", "-", text)
    text = _MIXED_NUMBER.sub(r"\1+\2", text)
    text = re.sub(r"[ {}]", "", text).lower()
    return _as_integer(text) or text


def _as_float(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _is_integral(value: float) -> bool:
    return abs(value - round(value)) <= 1e-7


def _as_integer(text: str) -> str | None:
    """Return ``text`` as a plain integer when it is one, thousands commas allowed; else None."""
    if len(text) > MAX_INTEGER_LENGTH:
        return None
    plain = _THOUSANDS.sub("", text)
    value = _as_float(plain)
    if value is None or not _is_integral(value):
        return None
    return str(int(plain)) if re.fullmatch(r"[+-]?\d+", plain) else str(round(value))


def _elements(text: str) -> list[str]:
    """Return the members of a tuple or interval; the text itself when it is neither."""
    if not text:
        return []
    if len(text) > 2 and text[0] in "([" and text[-1] in ")]" and not set(text[1:-1]) & set("()[]"):
        return [element.strip() for element in text[1:-1].split(",")]
    return [text]


def _equal_elements(given: str, truth: str) -> bool:
    if _FRACTION.match(given) and _FRACTION.match(truth):
        return given == truth  # a fraction must be given in lowest terms, as the truth is
    if (_as_integer(truth) is None) != (_as_integer(given) is None):
        return False
    return _are_symbolically_equal(given, truth)


def _are_symbolically_equal(given: str, truth: str) -> bool:
    difference = f"({truth})-({given})"
    if given == truth:
        return True
    letters = set(re.sub(r"sqrt|frac", "", difference)) & set("abcdefghijklmnopqrstuvwxyz")
    if len(letters) > 2 or len(difference) > MAX_SYMBOLIC_LENGTH or _REFUSED.search(difference):
        return False
    return is_zero(difference)


def grade_answer_sympy(given_answer: str, ground_truth: str) -> bool:
    """Return True when the two answers have the same symbolic form, member by member, or sympy shows them equal."""
    if max(len(given_answer), len(ground_truth)) > MAX_FORM_LENGTH:
        return False
    truth, given = _symbolic_form(ground_truth), _symbolic_form(given_answer)
    if truth == given:
        return True
    if not given:
        return False
    truths, givens = _elements(truth), _elements(given)
    if len(truths) > 1 and (truth[0] != given[0] or truth[-1] != given[-1]):
        return False
    if not truths or len(truths) != len(givens):
        return False
    return all(_equal_elements(g, t) for g, t in zip(givens, truths, strict=True))


# ------------------------------------------------------------ the graders


def is_same_answer(given_answer: str, ground_truth: str) -> bool:
    """Return True when either normal form is the same."""
    return grade_answer_mathd(given_answer, ground_truth) or grade_answer_sympy(given_answer, ground_truth)


def truth_of_label(label: Any) -> str | None:
    r"""Return the answer that a label states: its box when it has one, else its text; None for an empty label
    or one that is too long.
    """
    if label is None or label == "":
        return None
    text = str(label)
    if "\\boxed" in text:
        return extract_answer(text)
    return text if len(text) <= MAX_ANSWER_LENGTH else None


def grade_answer_verl(solution_str: str, ground_truth: Any) -> bool:
    """Grade as ``--rm-type math``: 1 when the last box of the solution holds the ground truth.  An empty ground truth
    is never met.
    """
    truth = truth_of_label(ground_truth)
    given = extract_answer(solution_str)
    return truth is not None and given is not None and is_same_answer(given, truth)


# ``--rm-type math_verify``: Hugging Face's math-verify decides, in place of the two normal forms of ``math_utils``.
#
# More generous than ``--rm-type math``: unreduced fractions (``\frac{2}{4}``), powers (``10^{2}``), sets and intervals
# in other spellings count as equal.  It has a type of its own, so that rewards of the other types stay what they were.


INSTALL_MATH_VERIFY = "--rm-type math_verify needs the package math-verify: pip install 'math-verify[antlr4_13_2]'"


def is_math_verify_installed() -> bool:
    """Return True when math-verify can be imported."""
    return importlib.util.find_spec("math_verify") is not None


def compute_math_verify_reward(response: str, label: Any) -> int:
    """Return 1 when the last box of the response holds the label, else 0."""
    if not is_math_verify_installed():
        raise ConfigError(INSTALL_MATH_VERIFY)
    truth, given = truth_of_label(label), extract_answer(response)
    if truth is None or given is None:
        return 0
    if given == truth or max(len(given), len(truth)) > MAX_FORM_LENGTH:
        return int(given == truth)
    return int(is_same_by_math_verify(f"${truth}$", f"${given}$"))
