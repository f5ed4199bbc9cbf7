r"""Checks whether the boxed answer of a response is right.  Used by ``--rm-type math`` and ``deepscaler``.

Answers are compared in two normal forms.  The string form (``mathd_normalize_answer``, from the MATH data set of
Hendrycks et al.) unifies spelling: ``\dfrac12``, ``\frac{1}{2}``, ``0.5`` and ``1/2`` become the same.  The symbolic
form strips units and LaTeX; sympy, in a separate process with a time limit, decides whether the expressions are equal.
Source: MATH, arXiv:2103.03874; the PRM800K grader, arXiv:2305.20050.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any

from slime.flags.reward import INSTALL_MATH_VERIFY, is_math_verify_installed
from slime.rollout.rm_hub.latex import FRACTION, latex_to_text
from slime.rollout.rm_hub.symbolic import is_same_by_math_verify, is_zero
from slime.utils.errors import ConfigError

MAX_ANSWER_LENGTH = 20_000
"""Boxes and labels with more characters are ignored."""
MAX_FORM_LENGTH = 2000
"""Longer answers are compared in the string form only."""
MAX_SYMBOLIC_LENGTH = 512
"""Longer expressions are not passed to sympy."""
MAX_INTEGER_LENGTH = 1000

# ------------------------------------------------------------ the boxed answer


def last_boxed_only_string(string: str) -> str | None:
    r"""Return the last ``\boxed{...}`` of a text, or else the last ``\fbox{...}``, with balanced braces.

    Returns None if there is none or it is longer than ``MAX_ANSWER_LENGTH`` characters.
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
    r"""Return the content of ``\boxed{...}``; None if the text has another form."""
    prefix = "\\boxed{"
    if text is None or not text.startswith(prefix) or not text.endswith("}"):
        return None
    return text[len(prefix) : -1]


def extract_boxed_answer(solution: str) -> str | None:
    """Return the content of the last box of a solution; None without one."""
    return remove_boxed(last_boxed_only_string(solution))


def extract_answer(passage: str) -> str | None:
    """Return the content of the last box of a passage; None if it is empty or has no box."""
    return extract_boxed_answer(passage) if passage and "\\boxed" in passage else None


# ------------------------------------------------------------ the string form

_TEXT_ONLY = re.compile(r"^\\text\{(.+?)\}$")
_MATHD_REMOVE = ("\n", "\\!", "\\left", "\\right", "^{\\circ}", "^\\circ", "\\$")
_ONE_ARGUMENT = r"[^{}\\\s]"
_UNIT_AT_END = re.compile(r"\\text\{ (?!and\b|or\b)[^{}]*\}(?:\^\{?\d\}?)?[\s.]*$")
_BETWEEN_THOUSANDS = re.compile(r"(?<=\d) (?=\d{3}(?!\d))")


def mathd_normalize_answer(answer: str | None) -> str | None:
    r"""Normalize spelling: remove units and spaces; write ``1/2`` and ``0.5`` as ``\frac{1}{2}``."""
    if answer is None:
        return None
    text = _unwrap_text(answer.strip())
    text = text.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = text.replace("tfrac", "frac").replace("dfrac", "frac")
    for piece in _MATHD_REMOVE:
        text = text.replace(piece, "")
    text = _UNIT_AT_END.sub("", text) or text
    text = text.replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    if text.startswith("."):
        text = "0" + text
    left, equals, right = text.partition("=")
    if equals and "=" not in right and len(left) <= 2:
        text = right
    text = re.sub(r"\\sqrt\s*(\w)", r"\\sqrt{\1}", text)
    text = re.sub(rf"\\frac *({_ONE_ARGUMENT}) *({_ONE_ARGUMENT})", r"\\frac{\1}{\2}", text)
    text = re.sub(rf"\\frac *({_ONE_ARGUMENT}) *\{{", r"\\frac{\1}{", text)
    text = without_blanks(text)
    if text == "0.5":
        text = "\\frac{1}{2}"
    return re.sub(r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}", text)


def without_blanks(text: str) -> str:
    """Remove spaces, except between digits of two numbers: ``1 2`` is not 12, but ``1 000`` becomes ``1000``."""
    return re.sub(r"(?<!\d) +| +(?!\d| )", "", _BETWEEN_THOUSANDS.sub("", text))


def grade_answer_mathd(given_answer: str, ground_truth: str) -> bool:
    """Return True if the two answers have the same string form."""
    return mathd_normalize_answer(ground_truth) == mathd_normalize_answer(given_answer)


def _unwrap_text(text: str) -> str:
    match = _TEXT_ONLY.match(text)
    return match.group(1).strip() if match else text


# ------------------------------------------------------------ the symbolic form

_UNIT = "(?:degree|cm|centimeter|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard)(?:es)?s?"
_UNITS = re.compile(
    rf"\\(?:text|mathrm|mbox)\{{\s*{_UNIT}\s*\}}\s*(?:\^\{{?[0-9]+\}}?)?"
    rf"|(?<![A-Za-z]){_UNIT}(?![A-Za-z]) *(?:\^\{{?[0-9]+\}}?)?"
)
_FRACTION = re.compile(r"^-?\d+\.?/0*[1-9]\d*\.?$")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d\d\d(?!\d))")
_MIXED_NUMBER = re.compile(rf"(-?)(?<!\d)(\d+) +{FRACTION[0]}?(\d+/\d+){FRACTION[1]}?")
_ONE_MARK = re.compile(r"([_^])\((-?(?:[0-9]+|[^\W\d_]))\)(?![0-9.])")
_REFUSED = re.compile(r"\^\{|\^\(|\^\d+\^|\^\d\d|[_'\"\\;:]|\d \d")


def _symbolic_form(answer: str) -> str:
    """Return plain text that sympy can parse, without units, LaTeX or spaces."""
    text = _unwrap_text(answer)
    text = re.sub(r"\\?[%$]", "", text)
    text = text.replace(" or ", " , ").replace(" and ", " , ")
    for word, power in (("million", 6), ("billion", 9), ("trillion", 12)):
        text = text.replace(word, f"*10^{power}")
    text = _UNITS.sub("", text) if _UNITS.sub("", text).strip() else text
    text = re.sub(r"\^ *\\circ", "", text)
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    text = re.sub(r",\\! *", "", text)
    text = _as_integer(text.strip()) or text
    if "\\" in text:
        text = latex_to_text(text)
    text = re.sub(r"- *", "-", text)
    text = _MIXED_NUMBER.sub(lambda found: f"-({found[2]}+{found[3]})" if found[1] else f"{found[2]}+{found[3]}", text)
    text = re.sub("[A-Z]+", lambda word: word[0].lower(), without_blanks(_flat(text)))
    return _as_integer(text) or text


def _flat(text: str) -> str:
    """Remove braces and ``FRACTION`` marks, or turn them into parentheses where precedence needs them.

    Parentheses are needed around exponents and subscripts of several characters, and around fractions that are
    divisors or are raised to a power.
    """
    pieces: list[str] = []
    opened: list[int] = []
    last = ""
    for position, mark in enumerate(text):
        if mark == "{" or mark == FRACTION[0]:
            opened.append(len(pieces))
            pieces.append("(" if last and last in ("^_" if mark == "{" else "^_/") else "")
        elif opened and (mark == "}" or mark == FRACTION[1]):
            begin = opened.pop()
            if mark == FRACTION[1] and text[position + 1 : position + 2] in ("^", "!"):
                pieces[begin] = "("
            pieces.append(")" if pieces[begin] else "")
        elif mark not in ("}", FRACTION[1]):
            pieces.append(mark)
        else:
            continue
        last = pieces[-1].strip() or last
    return _ONE_MARK.sub(r"\1\2", "".join(pieces))


def _as_integer(text: str) -> str | None:
    """Return ``text`` as a plain integer if it is one, with or without thousands commas; else None."""
    if len(text) > MAX_INTEGER_LENGTH:
        return None
    try:
        value = Decimal(_THOUSANDS.sub("", text))
        return str(int(value)) if abs(value.adjusted()) < MAX_INTEGER_LENGTH and value == int(value) else None
    except (InvalidOperation, ValueError, OverflowError):  # not a number, or not finite
        return None


def _elements(text: str) -> list[str]:
    """Return the members of a tuple or interval; the text as the only element if it is neither."""
    if not text:
        return []
    if len(text) > 2 and text[0] in "([" and text[-1] in ")]" and not set(text[1:-1]) & set("()[]"):
        return [element.strip() for element in text[1:-1].split(",")]
    return [text]


def _equal_elements(given: str, truth: str) -> bool:
    if _FRACTION.match(given) and _FRACTION.match(truth):
        return given == truth  # fractions must be in lowest terms, like the ground truth
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
    """Return True if the symbolic forms are the same, or if sympy shows all their members to be equal."""
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


_UNIT_NAMES = {
    name: names.split()[0]
    for names in (
        "mm millimeter millimetre|cm centimeter centimetre|dm decimeter|m meter metre|km kilometer kilometre|in inch"
        "|ft foot feet|yd yard|mi mile|mg milligram|g gram|kg kilogram|lb pound|oz ounce|ml milliliter|l liter litre"
        "|s sec second|min minute|h hr hour|day|week|month|year|am|pm|dollar|cent|euro|degree|rad radian"
    ).split("|")
    for names in (names,)
    for name in names.split()
}
_NAMED_AT_END = re.compile(
    r"[\d)}\s](?:\\[,;!: ]|~|\s)*(?:\\(?:text|mathrm|mbox)\s*\{([^{}\\]*)\}|([A-Za-z]{2,}))"
    r"\s*(?:\^\s*\{?-?\d+\}?)?[\s.$]*$"
)
_MAX_UNIT_LENGTH = 100
_UNKNOWN = re.compile(r"[\s$]*([A-Za-z])\s*=(?!.*=)")


def _units(answer: str) -> set[str]:
    """Return the units that follow the number in an answer."""
    found = _NAMED_AT_END.search(answer[-_MAX_UNIT_LENGTH:]) if re.search(r"\d", answer) else None
    words = re.findall(r"[a-z]+", (found[1] or found[2] or "").lower().replace(".", "")) if found else []
    singular = [word if word in _UNIT_NAMES else re.sub(r"(?:(?<=ch)e)?s$", "", word) for word in words]
    return {_UNIT_NAMES[word] for word in singular if word in _UNIT_NAMES}


def names_another(given_answer: str, ground_truth: str) -> bool:
    """Return True if both answers name units or unknowns (``x = 5``), but different ones."""
    units = _units(given_answer), _units(ground_truth)
    names = _UNKNOWN.match(given_answer), _UNKNOWN.match(ground_truth)
    other_unknown = names[0] and names[1] and names[0][1].lower() != names[1][1].lower()
    return bool(units[0] and units[1] and units[0] != units[1] or other_unknown)


def is_same_answer(given_answer: str, ground_truth: str) -> bool:
    """Return True if the answers agree in either normal form and do not name different units or unknowns."""
    if names_another(given_answer, ground_truth):
        return False
    return grade_answer_mathd(given_answer, ground_truth) or grade_answer_sympy(given_answer, ground_truth)


def truth_of_label(label: Any) -> str | None:
    r"""Return the content of the label's box, or else its text; None if the label is empty or too long."""
    if label is None or label == "":
        return None
    text = str(label)
    if "\\boxed" in text:
        return extract_answer(text)
    return text if len(text) <= MAX_ANSWER_LENGTH else None


def grade_answer_verl(solution_str: str, ground_truth: Any) -> bool:
    """Return True if the last box of the solution equals the ground truth; an empty ground truth never matches.

    This is ``--rm-type math``.
    """
    truth = truth_of_label(ground_truth)
    given = extract_answer(solution_str)
    return truth is not None and given is not None and is_same_answer(given, truth)


# ``--rm-type math_verify``: Hugging Face's math-verify compares the answers instead of the symbolic form.
#
# It is more lenient than ``--rm-type math``: unreduced fractions (``\frac{2}{4}``), powers (``10^{2}``), sets and
# intervals in other spellings also match.  It is a separate type so that the rewards of ``math`` do not change.


_NO_FORMULA = re.compile(r"'|\d:\d\d|(?<![_^\d])\d+ +\d+(?![\d/])|\b(?:or (?:more|less|fewer)|at (?:least|most))\b")
"""Not passed to math-verify, which ignores primes and these words, and reads times as fractions and two numbers as a
sum.
"""


def compute_math_verify_reward(response: str, label: Any) -> int:
    """Return 1 if the last box of the response equals the label, else 0."""
    if not is_math_verify_installed():
        raise ConfigError(INSTALL_MATH_VERIFY)
    truth, given = truth_of_label(label), extract_answer(response)
    if truth is None or given is None:
        return 0
    if max(len(given), len(truth)) > MAX_FORM_LENGTH:
        return int(given == truth)
    if grade_answer_mathd(given, truth) or names_another(given, truth) or _NO_FORMULA.search(f"{given}\n{truth}"):
        return int(is_same_answer(given, truth))
    return int(is_same_by_math_verify(f"${truth}$", f"${given}$"))
