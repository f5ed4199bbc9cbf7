"""``--rm-type gpqa``: multiple choice, answered with a letter or the text of a choice."""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

DEFAULT_VALID_LETTERS = list(string.ascii_uppercase[:10])

_NO_PUNCTUATION = str.maketrans({mark: " " for mark in string.punctuation})
# A capital letter by itself, or a lowercase letter in parentheses or at the end of a line.  Letters of other scripts
# may surround it.
_MENTION = re.compile(
    r"(?<![A-Za-z0-9])(?:[A-Z]|(?<=\()[a-z](?=\))|[a-z](?=\s?[.)]?\s?(?:$|\n)))(?![A-Za-z0-9])", re.MULTILINE
)
MAX_MENTIONS = 2000
"""Number of letter mentions to examine, from the end of the response."""
_BEFORE, _AFTER = 100, 40
"""Characters of context before and after a mention."""
_MARKS = r"(?:[\s*_$\"'`{}()\[<:=]|\\(?:boxed|text|textbf|mathrm|mathbf|bf)\b)*\Z"
_IS_FINAL = re.compile(rf"(?:\\boxed|\bfinal\s(?:answer|option)(?:\sis)?){_MARKS}", re.IGNORECASE)
# English, Chinese ("xuan", "da an"), Japanese ("kotae", "seikai") and Korean ("jeongdap") words for stating an answer;
# "xuan xiang" (option) is excluded.
_IS_STATED = re.compile(
    r"(?:\banswer\b(?:[^.\n:]{0,60}?(?:\bis\b|:)|\s(?:option|choice|letter))?|\b(?:option|choice)(?:\sis\b|\s?[:=])"
    r"|\b(?:correct|right|best)\s(?:option|choice)(?:\sis\b)?|\u9009(?!\u9879)\u62e9?"
    rf"|(?:\u7b54\u6848|\u7b54\u3048|\u6b63\u89e3|\uc815\ub2f5)[^\n.A-Z]{{0,12}}?){_MARKS}",
    re.IGNORECASE,
)
_IS_CALLED_RIGHT = re.compile(r"[)*]*\sis\s(?:the\s)?(?:correct|right)\b")
_IS_REJECTED = re.compile(
    r"(?:\bnot|n't|\bthan|\binstead of|\beliminat\w+|\bexclud\w+|\brul\w+ out)(?:\s\w+)?[\s(*]*\Z"
)
_IS_CALLED_WRONG = re.compile(
    r"[)*}$'\"]*\s?(?:(?:is|are|was|can|does|would be|seems)\s?)?"
    r"(?:not\b|n't|wrong\b|incorrect\b|false\b|\u662f?[\u9519\u4e0d])"
)
_IS_A_WORD = re.compile(r"'[a-z]|[ \t](?!(?:and|as|because|is|it|or|since)\b)[a-z]")
"""Follows a letter that is the English article "A" or pronoun "I" rather than a choice."""
_LIST = r"[)*\s]*(?:[,/&\u3001\u548c\u6216]|\b(?:and|or)\b)\s?(?:and |or )?(?:(?:[Oo]ption|[Cc]hoice)\s)?[(*]*"
_IS_BEFORE_ANOTHER = re.compile(_LIST + r"[A-Z](?![A-Za-z0-9'])(?!\s(?!and\b|are\b|or\b)[a-z])")
_IS_AFTER_ANOTHER = re.compile(rf"(?<![A-Za-z0-9])[A-Z](?:[\s.,;:|()*-]+|{_LIST})\Z")
_ANSWER_BEGINS = re.compile(r"\banswer\b\s?(?:is\b|:)|\\boxed|\u7b54\u6848", re.IGNORECASE)


def compute_gpqa_reward(response: str, label: Any, metadata: Mapping[str, Any] | None = None) -> float:
    """Return 1.0 if the response picks the right choice, else 0.0.

    Args:
        response: Response text.  Everything before the last ``</think>`` is ignored.
        label: The right letter, the index of the right choice, or its text.
        metadata: May hold ``choices`` (list, or mapping from letter to text), ``valid_letters``, ``correct_letter``
            (overrides the label), and ``correct_answer`` or ``answer_text`` (further right texts).
    """
    if not response:
        return 0.0
    metadata = metadata or {}
    choices = _choices(metadata.get("choices"))
    letters = _valid_letters(metadata.get("valid_letters"), choices)
    correct = _correct_letter(metadata.get("correct_letter"), label, letters, choices)
    answer = _with_short_gaps(unicodedata.normalize("NFKC", response.rsplit("</think>", 1)[-1]))
    picked = _picked_letter(answer, letters)
    if picked is not None and correct is not None:
        return float(picked == correct)
    return float(_names_correct_text(answer, _correct_texts(metadata, label, correct, choices), choices))


def _with_short_gaps(text: str) -> str:
    """Collapse each run of white space to one space or one newline.

    The patterns allow white space in several adjacent places, so matching a run of length n would take O(n^4) time.
    """
    return re.sub(r"\s{2,}", lambda gap: "\n" if "\n" in gap[0] else " ", text)


def _choices(raw: Any) -> dict[str, str]:
    """Return letter -> text of the choice."""
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
    """Return the letter picked by the response, or None if there is none or it names several letters at once.

    The last letter in a box or called the final answer is preferred, then the last one called the answer, then the
    last capital by itself.
    """
    picked, best_rank = None, 0
    for mention in list(_MENTION.finditer(answer))[-MAX_MENTIONS:]:
        letter, (start, end) = mention[0], mention.span()
        before, after = answer[max(0, start - _BEFORE) : start], answer[end : end + _AFTER]
        is_word = letter in "AI" and _IS_A_WORD.match(after)
        if letter.upper() not in letters or _IS_REJECTED.search(before) or _IS_CALLED_WRONG.match(after):
            continue
        names_several = bool(_IS_BEFORE_ANOTHER.match(after) or _IS_AFTER_ANOTHER.search(before))
        if names_several:
            rank = 0
        elif _IS_FINAL.search(before):
            rank = 2
        elif _IS_STATED.search(before) or _IS_CALLED_RIGHT.match(after):
            rank = 1
        else:
            rank = 0
        if rank >= best_rank and not (is_word and (rank == 0 or letter == "I")) and (rank or letter.isupper()):
            picked, best_rank = None if names_several else letter.upper(), rank
    return picked


def _correct_texts(
    metadata: Mapping[str, Any], label: Any, correct: str | None, choices: Mapping[str, str]
) -> list[str]:
    """Return the accepted texts of the right answer."""
    texts = [choices.get(correct or ""), metadata.get("correct_answer"), metadata.get("answer_text")]
    if not isinstance(label, int) or correct is None:  # otherwise the label is the index of a choice, not a text
        texts.append(label)
    return [str(text) for text in texts if text is not None and str(text).strip()]


def _names_correct_text(answer: str, texts: list[str], choices: Mapping[str, str]) -> bool:
    """Return True if the answer part, or else the whole response, names the right choice and no other."""
    # Single letters are not texts: "a" occurs in every sentence.
    right = {_plain(text) for text in texts if not _is_letter(text, texts)} - {""}
    known = sorted((right | set(map(_plain, choices.values()))) - {""}, key=len, reverse=True)
    begin = max((match.end() for match in _ANSWER_BEGINS.finditer(answer)), default=0)
    for part in (answer[begin:], answer):
        words = f" {_plain(part)} "
        named = set()
        for text in known:  # longest first, so that "light blue" does not count as "blue"
            words = re.sub(rf" (?:not|t|than) {re.escape(text)} ", " ", words)
            if f" {text} " in words:
                named.add(text)
                words = words.replace(f" {text} ", " | ")
        if named:
            return named <= right
    return False


def _is_letter(text: str, texts: list[str]) -> bool:
    return len(text.strip()) == 1 and text.strip().isalpha() and text == texts[-1] and len(set(texts)) > 1


def _plain(text: str) -> str:
    """Return the words in lower case, without punctuation."""
    return " ".join(unicodedata.normalize("NFKC", text).lower().translate(_NO_PUNCTUATION).split())
