"""The search of the built site, ranked like the theme's worker (lunr 2.3 without stemmer and length norm)."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from pathlib import Path

K1 = 1.2
STOP_WORDS = frozenset(
    "a able about across after all almost also am among an and any are as at be because been but by can cannot could "
    "dear did do does either else ever every for from get got had has have he her hers him his how however i if in "
    "into is it its just least let like likely may me might most must my neither no nor not of off often on only or "
    "other our own rather said say says she should since so some than that the their them then there these they this "
    "tis to too twas us wants was we were what when where which while who whom why will with would yet you "
    "your".split()
)
BOOST = {"title": 1000.0, "text": 1.0, "tags": 1e6}


class SiteSearch:
    """Every section of the site by its address."""

    def __init__(self, index: Path) -> None:
        content = json.loads(index.read_text(encoding="utf-8"))
        assert content["config"]["lang"] == ["en"] and "stemmer" not in content["config"]["pipeline"]
        self.separator = re.compile(content["config"]["separator"])
        self.docs = content["docs"]
        self.postings: dict[str, dict[str, Counter[int]]] = defaultdict(lambda: defaultdict(Counter))
        for number, doc in enumerate(self.docs):
            for field in BOOST.keys() & doc.keys():
                text = " ".join(doc[field]) if isinstance(doc[field], list) else re.sub(r"<[^>]*>", " ", doc[field])
                for word in self.separator.split(text.lower()):
                    if word and word not in STOP_WORDS:
                        self.postings[word][field][number] += 1

    def pages(self, question: str) -> list[str]:
        """Return the matching pages, best first; words of the question match as prefixes."""
        clauses = [word for word in self.separator.split(question.lower()) if word]
        scores: dict[int, float] = defaultdict(float)
        found: dict[int, set[str]] = defaultdict(set)
        terms = {term for clause in clauses for term in self.postings if term.startswith(clause)}
        weights = {term: sum(term.startswith(clause) for clause in clauses) for term in terms}
        norm = math.sqrt(sum(weight**2 for weight in weights.values())) or 1.0
        for term in terms:
            fields = self.postings[term]
            holders = sum(len(counts) for counts in fields.values())
            idf = math.log(1 + abs((len(self.docs) - holders + 0.5) / (holders + 0.5)))
            for field, counts in fields.items():
                for number, count in counts.items():
                    weight = idf * (K1 + 1) * count / (K1 + count) * BOOST[field]
                    scores[number] += weights[term] * weight / norm
                    found[number] |= {clause for clause in clauses if term.startswith(clause)}
        for number in scores:
            share = len(found[number]) / len(found[number] | {word for word in clauses if word not in STOP_WORDS})
            is_page = "#" not in self.docs[number]["location"]
            scores[number] *= 1 + (is_page + share) ** 2
        ranked = sorted(scores, key=lambda number: -scores[number])
        return list(dict.fromkeys(self.docs[number]["location"].partition("#")[0] for number in ranked))
