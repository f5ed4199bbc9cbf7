"""A small retriever: BM25 over the lines of a file.  In the rollout's own process, or as a server.

    python examples/search-r1/local_search_server.py --corpus facts.txt --port 8000

answers ``POST /retrieve {"query": "code Kiv", "topk": 3}`` with ``{"documents": [...], "scores": [...]}``.

Source: Robertson and Zaragoza, The Probabilistic Relevance Framework: BM25 and Beyond, 2009.
"""

from __future__ import annotations

import argparse
import heapq
import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

K1 = 1.2
"""BM25's k1: the smaller, the sooner further occurrences of a word count for little."""
B = 0.75
"""BM25's b: the discount of long documents, 0 for none, 1 for full."""

_WORD = re.compile(r"\w+")


def words_of(text: str) -> list[str]:
    """Lower-case words."""
    return _WORD.findall(text.lower())


class Retriever:
    """An index of documents; it never changes, so threads may share it."""

    def __init__(self, documents: Sequence[str]) -> None:
        self.documents = list(documents)
        counts = [Counter(words_of(document)) for document in self.documents]
        self._lengths = [sum(count.values()) for count in counts]
        self._mean_length = sum(self._lengths) / max(len(self._lengths), 1)
        self._postings: dict[str, list[tuple[int, int]]] = {}
        for number, count in enumerate(counts):
            for word, times in count.items():
                self._postings.setdefault(word, []).append((number, times))

    @classmethod
    def of_file(cls, path: str | Path) -> Retriever:
        """The index of a file with one document a line."""
        return cls([line for line in Path(path).read_text().splitlines() if line.strip()])

    def scores(self, query: str) -> dict[int, float]:
        """Number of the document -> BM25 score, of those that share a word with the query."""
        scores: dict[int, float] = {}
        for word in set(words_of(query)):
            postings = self._postings.get(word, [])
            rarity = math.log(1 + (len(self.documents) - len(postings) + 0.5) / (len(postings) + 0.5))
            for number, times in postings:
                norm = K1 * (1 - B + B * self._lengths[number] / self._mean_length)
                scores[number] = scores.get(number, 0.0) + rarity * times * (K1 + 1) / (times + norm)
        return scores

    def search(self, query: str, topk: int) -> list[str]:
        """The best documents, best first; of equal ones the earlier first."""
        return [self.documents[number] for number, _ in self.best(query, topk)]

    def best(self, query: str, topk: int) -> list[tuple[int, float]]:
        """(number, score) of the best documents."""
        return heapq.nsmallest(topk, self.scores(query).items(), key=lambda item: (-item[1], item[0]))


def application(retriever: Retriever) -> web.Application:
    """The server."""

    async def retrieve(request: web.Request) -> web.Response:
        body = await request.json()
        best = retriever.best(str(body["query"]), int(body.get("topk", 3)))
        return web.json_response(
            {"documents": [retriever.documents[n] for n, _ in best], "scores": [score for _, score in best]}
        )

    app = web.Application()
    app.add_routes([web.post("/retrieve", retrieve)])
    return app


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="file with one document a line")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    if not options.corpus.is_file():
        parser.error(f"--corpus {options.corpus} is no file; give a text with one document a line")
    web.run_app(application(Retriever.of_file(options.corpus)), host=options.host, port=options.port)


if __name__ == "__main__":
    main()
