"""``--rm-type gpqa``: multiple choice, answered by a letter or by the text of the choice."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

DEFAULT_VALID_LETTERS = list(string.ascii_uppercase[:10])

_NO_PUNCTUATION = str.maketrans({mark: " " for mark in string.punctuation})
# Tried in this order; {x} is a capital letter, or a lower-case one that ends its line or is in brackets.
_LETTER = r"(?:\(\s*([A-Za-z])\s*\)|([A-Z])\b|([a-z])(?=\s*[.)]?\s*(?:$|\n)))"
_PATTERNS = tuple(
    re.compile(pattern.replace("{x}", _LETTER), re.MULTILINE)
    for pattern in (
        r"(?i:final\s+(?:answer|option))\s*(?i:is)?\s*[:=]?\s*\**\s*{x}",
        r"(?i:answer|option|choice)\s*(?i:is)?\s*[:=]?\s*\**\s*{x}",
        r"\b{x}\s*(?i:is\s+(?:the\s+)?correct)",
    )
)


def compute_gpqa_reward(response: str, label: Any, metadata: Mapping[str, Any] | None = None) -> float:
    """Return 1.0 when the response picks the right choice, else 0.0.

    Args:
        response: text; what precedes the last ``</think>`` is not read.
        label: the right letter, the index of the right choice, or its text.
        metadata: may hold ``choices`` (list, or mapping from letter to text), ``valid_letters``, ``correct_letter``
            and ``correct_answer`` or ``answer_text``; these win over the label.
    """
    if not response:
        return 0.0
    metadata = metadata or {}
    choices = _choices(metadata.get("choices"))
    letters = _valid_letters(metadata.get("valid_letters"), choices)
    correct = _correct_letter(metadata.get("correct_letter"), label, letters, choices)
    answer = _with_short_gaps(response.rsplit("</think>", 1)[-1])
    picked = _picked_letter(answer, letters)
    if picked is not None and correct is not None:
        return float(picked == correct)
    return float(_names_correct_text(answer, _correct_texts(metadata, label, correct, choices)))


def _with_short_gaps(text: str) -> str:
    """Shrink each run of white space to one space or one line end.

    The patterns allow white space in several places in a row: a run of n of them would be tried in n^4 ways.
    """
    return re.sub(r"\s{2,}", lambda gap: "\n" if "\n" in gap[0] else " ", text)


def _choices(raw: Any) -> dict[str, str]:
    """Return choice text by letter."""
    if isinstance(raw, Mapping):
        return {str(letter).upper(): str(text) for letter, text in raw.items()}
    if isinstance(raw, Sequence) and not isinstance(raw, str):
        return {letter: str(text) for letter, text in zip(string.ascii_uppercase, raw, strict=False)}
    return {}


def _valid_letters(raw: Any, choices: Mapping[str, str]) -> list[str]:
    if raw:
        return [str(letter).upper() for letter in raw]
    return list(choices) or DEFAULT_VALID_LETTERS


def _correct_letter(raw: Any, label: Any, letters: list[str], choices: Mapping[str, str]) -> str | None:
    if raw:
        return str(raw).strip().upper()
    if isinstance(label, int) and not isinstance(label, bool):
        return letters[label] if 0 <= label < len(letters) else None
    text = str(label or "").strip()
    by_text = [letter for letter, choice in choices.items() if _plain(choice) == _plain(text)]
    if by_text:
        return by_text[0]
    return text.upper() if text.upper() in letters else None


def _picked_letter(answer: str, letters: list[str]) -> str | None:
    """Return the letter of the answer: the last one named as such, else the last valid capital on its own."""
    for pattern in _PATTERNS:
        for match in reversed(list(pattern.finditer(answer))):
            letter = next(group for group in match.groups() if group).upper()
            if letter in letters:
                return letter
    alone = [letter for letter in re.findall(r"\b([A-Z])\b", answer) if letter in letters]
    return alone[-1] if alone else None


def _correct_texts(
    metadata: Mapping[str, Any], label: Any, correct: str | None, choices: Mapping[str, str]
) -> list[str]:
    """Return the texts that the right answer may have in words."""
    texts = [choices.get(correct or ""), metadata.get("correct_answer"), metadata.get("answer_text")]
    if not isinstance(label, int) or correct is None:  # else it is the index of a choice, and no text
        texts.append(label)
    return [str(text) for text in texts if text is not None and str(text).strip()]


def _names_correct_text(answer: str, texts: list[str]) -> bool:
    words = f" {_plain(answer)} "
    # A letter is no text: "a" would be found in every sentence.
    return any(f" {_plain(text)} " in words for text in texts if _plain(text) and not _is_letter(text, texts))


def _is_letter(text: str, texts: list[str]) -> bool:
    return len(text.strip()) == 1 and text.strip().isalpha() and text == texts[-1] and len(set(texts)) > 1


def _plain(text: str) -> str:
    """Return lower-case words, punctuation as spaces."""
    return " ".join(text.lower().translate(_NO_PUNCTUATION).split())
