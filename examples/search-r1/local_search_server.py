"""A small retriever with BM25 over the lines of a file, for use in the rollout process or as a server.

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
"""BM25's k1: with smaller values, repeated occurrences of a word add less."""
B = 0.75
"""BM25's b: length normalization of documents, from 0 (none) to 1 (full)."""

_WORD = re.compile(r"\w+")


def words_of(text: str) -> list[str]:
    """Return the lower-case words of a text."""
    return _WORD.findall(text.lower())


class Retriever:
    """An immutable index of documents, which threads may share."""

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
        """Index a file with one document per line."""
        return cls([line for line in Path(path).read_text().splitlines() if line.strip()])

    def scores(self, query: str) -> dict[int, float]:
        """Return document number -> BM25 score, for documents that share a word with the query."""
        scores: dict[int, float] = {}
        for word in set(words_of(query)):
            postings = self._postings.get(word, [])
            rarity = math.log(1 + (len(self.documents) - len(postings) + 0.5) / (len(postings) + 0.5))
            for number, times in postings:
                norm = K1 * (1 - B + B * self._lengths[number] / self._mean_length)
                scores[number] = scores.get(number, 0.0) + rarity * times * (K1 + 1) / (times + norm)
        return scores

    def search(self, query: str, topk: int) -> list[str]:
        """Return the ``topk`` best documents, best first; ties keep document order."""
        return [self.documents[number] for number, _ in self.best(query, topk)]

    def best(self, query: str, topk: int) -> list[tuple[int, float]]:
        """Return (number, score) of the ``topk`` best documents."""
        return heapq.nsmallest(topk, self.scores(query).items(), key=lambda item: (-item[1], item[0]))


def application(retriever: Retriever) -> web.Application:
    """Return the server application."""

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
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="file with one document per line")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    if not options.corpus.is_file():
        parser.error(f"--corpus {options.corpus} is no file; give a text file with one document per line")
    web.run_app(application(Retriever.of_file(options.corpus)), host=options.host, port=options.port)


if __name__ == "__main__":
    main()
