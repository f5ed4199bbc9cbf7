r"""``--rm-type dapo``: compares the text after the last ``Answer:`` with the label, after Minerva's normalization.

The grader returns a dict, so it needs ``--reward-key score``.
Source: DAPO, arXiv:2503.14476; the normalization is Minerva's, arXiv:2206.14858, appendix D.1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from slime.rollout.rm_hub.math_utils import last_boxed_only_string as _last_box
from slime.rollout.rm_hub.math_utils import names_another, without_blanks

TAIL_CHARS = 300
"""Only the end of a response is read."""
STRICT_TAIL_CHARS = 100
MAX_LABEL_LENGTH = 2000
"""No answer within ``TAIL_CHARS`` can equal a longer label."""
ANSWER_PATTERN = r"(?i)Answer\s*:\s*([^\n]+)"
NO_ANSWER = "[INVALID]"

SUBSTITUTIONS = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
REMOVED_WORDS = (
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents degrees cm "
    "gm pounds meters meals edges students childrentickets multiples \\text{s} \\text{.} \\text{\ns} \\text{}^2 "
    '\\text{}^3 \\text{\n} \\text{} \\mathrm{th} ^\\circ ^{\\circ} \\; ,\\! {,} " \\dots <|im_end|> <|endoftext|>'
).split(" ")


def last_boxed_only_string(string: str) -> str | None:
    r"""Return the last ``\boxed{...}`` with its braces balanced; None without one."""
    start = string.rfind("\\boxed{")
    return None if start < 0 else _last_box(string[start:])


def remove_boxed(text: str) -> str:
    r"""Return the content of ``\boxed{...}``; the text must have that form."""
    assert text.startswith("\\boxed{") and text.endswith("}"), f"not a box: {text!r}"
    return text[len("\\boxed{") : -1]


def normalize_final_answer(final_answer: str) -> str:
    """Apply Minerva's normalization: take the right side of an equation; remove units, formatting and spaces."""
    text = final_answer.split("=")[-1]
    for before, after in SUBSTITUTIONS:
        text = without_blanks(text) if before == " " else text.replace(before, after)
    kept = text
    for word in REMOVED_WORDS:
        text = text.replace(word, "")
    text = text or kept  # an answer that is only a unit is kept
    inner = text.split("$", 2)[1:]
    if len(inner) == 2 and "\n" not in text[:-1]:
        text = f"${inner[0]}$" + text[-1] * text.endswith("\n")
    for command in (r"text\{(.*?)", r"textbf\{(.*?)", r"overline\{(?!\d+\})(.*?)", r"boxed\{(.*)"):
        text = re.sub(rf"\\{command}\}}", r"\1", text)
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text)
    text = text.replace("$", "")
    if re.fullmatch(r"\d{1,3}(?:,\d{3})+", text):
        text = text.replace(",", "")
    return text.strip()


def is_correct_minerva(
    solution_str: str, gt: Any, gt_need_extract: bool = False, answer_pattern: str = ANSWER_PATTERN
) -> tuple[bool, str]:
    """Return ``(is_correct, prediction)`` from the last match of ``answer_pattern``.

    Args:
        gt_need_extract: Whether the ground truth is in a box.
    """
    found = re.findall(answer_pattern, solution_str)
    prediction = normalize_final_answer(found[-1] if found else NO_ANSWER)
    truth = str(gt)
    if len(truth) > MAX_LABEL_LENGTH:
        return False, prediction
    if gt_need_extract:
        truth = remove_boxed(last_boxed_only_string(truth) or "")
    is_same = prediction == _integral(normalize_final_answer(truth))
    return is_same and not names_another(found[-1] if found else "", truth), prediction


def _integral(text: str) -> str:
    """Convert ``42.0`` to ``42``; return any other text unchanged."""
    try:
        value = float(text)
        return str(int(value)) if value == int(value) else text
    except (ValueError, OverflowError):
        return text


def is_correct_strict_box(
    pred: str, gt: str, pause_tokens_index: Sequence[int] | None = None
) -> tuple[int, str | None]:
    """Return ``(1 or -1, prediction)`` from the last box in the last ``STRICT_TAIL_CHARS`` characters.

    Args:
        pause_tokens_index: Character positions of four pause marks.  If given, the search starts
            ``STRICT_TAIL_CHARS`` before the last mark instead.
    """
    if pause_tokens_index is not None:
        assert len(pause_tokens_index) == 4, f"four pause marks are expected, not {len(pause_tokens_index)}"
        tail = pred[max(0, pause_tokens_index[-1] - STRICT_TAIL_CHARS) :]
    else:
        tail = pred[-STRICT_TAIL_CHARS:]
    box = last_boxed_only_string(tail)
    prediction = None if box is None else remove_boxed(box)
    return (1 if prediction == gt else -1), prediction


def verify(
    solution_str: str,
    answer: str,
    strict_box_verify: bool = False,
    pause_tokens_index: Sequence[int] | None = None,
) -> tuple[bool, str | None]:
    """Return ``(is_correct, prediction)`` from the answer line, or from the last box if ``strict_box_verify``."""
    if strict_box_verify:
        score, boxed = is_correct_strict_box(solution_str, answer, pause_tokens_index)
        return score == 1, boxed
    return is_correct_minerva(solution_str, answer)


def compute_score(
    solution_str: str,
    ground_truth: Any,
    strict_box_verify: bool = False,
    pause_tokens_index: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Return ``{"score": 1.0 or -1.0, "acc": bool, "pred": str}`` for the last 300 characters of a response.

    ``pred`` is None if ``strict_box_verify`` is set and there is no box.
    """
    correct, prediction = verify(solution_str[-TAIL_CHARS:], ground_truth, strict_box_verify, pause_tokens_index)
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": prediction}
