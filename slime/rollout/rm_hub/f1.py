"""``--rm-type f1``: word overlap, as in SQuAD.

Source: SQuAD, arXiv:1606.05250, sec. 6.1.
"""

from __future__ import annotations

import re
import string
from collections import Counter

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ALL_OR_NOTHING = frozenset({"yes", "no", "noanswer"})


def normalize_answer(text: str) -> str:
    """Lowercase; remove punctuation, articles and extra spaces."""
    plain = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def f1_score(prediction: str | None, ground_truth: str) -> tuple[float, float, float]:
    """Return ``(f1, precision, recall)`` over words.  ``yes``, ``no`` and ``noanswer`` must match exactly."""
    zero = (0.0, 0.0, 0.0)
    if prediction is None:
        return zero
    given, truth = normalize_answer(prediction), normalize_answer(ground_truth)
    if given != truth and (given in _ALL_OR_NOTHING or truth in _ALL_OR_NOTHING):
        return zero
    given_words, truth_words = given.split(), truth.split()
    num_same = sum((Counter(given_words) & Counter(truth_words)).values())
    if num_same == 0:
        return zero
    precision = num_same / len(given_words)
    recall = num_same / len(truth_words)
    return 2 * precision * recall / (precision + recall), precision, recall
