"""A search engine over a file of documents: BM25, with the HTTP interface of Search-R1's retrieval servers.

python -m examples.search_r1.retrieval_server --corpus corpus.jsonl --port 8000

``POST /retrieve`` takes ``{"queries": [...], "topk": 3, "return_scores": true}`` and answers, per query, ``{"result":
[[{"document": {"id": ..., "contents": "\\"Title\\"\\ntext"}, "score": 1.5}]]}``; without scores there are
plain documents. ``GET /healthz`` answers when the index is there. Lines of the corpus are documents.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import math
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from aiohttp import web

Document = dict[str, Any]
_WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return _WORD.findall(text.lower())


class Index:
    """Okapi BM25 (Robertson and Zaragoza 2009, eq. 3.15) with the idf ln(1 + (N - n + 0.5) / (n + 0.5))."""

    def __init__(self, documents: list[Document], k1: float = 1.2, b: float = 0.75) -> None:
        self.documents = documents
        self._postings: dict[str, list[tuple[int, float]]] = defaultdict(list)
        counts = [Counter(words(document["contents"])) for document in documents]
        lengths = [count.total() for count in counts]
        mean = sum(lengths) / max(1, len(lengths))
        appears = Counter(word for count in counts for word in count)
        for number, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            for word, times in count.items():
                idf = math.log(1 + (len(documents) - appears[word] + 0.5) / (appears[word] + 0.5))
                weight = idf * times * (k1 + 1) / (times + k1 * (1 - b + b * length / mean))
                self._postings[word].append((number, weight))

    def search(self, query: str, topk: int) -> list[tuple[Document, float]]:
        """Return the best documents that have a word of the query, best first; of equal ones the earlier."""
        scores: dict[int, float] = defaultdict(float)
        for word in words(query):
            for number, weight in self._postings.get(word, ()):
                scores[number] += weight
        best = heapq.nsmallest(topk, scores, key=lambda number: (-scores[number], number))
        return [(self.documents[number], scores[number]) for number in best]


def application(index: Index) -> web.Application:
    """Return the server."""

    async def retrieve(request: web.Request) -> web.Response:
        body = await request.json()
        queries, topk = body.get("queries"), body.get("topk", 3)
        if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
            raise web.HTTPBadRequest(text=f"queries must be a list of texts, got {queries!r:.200}")
        found = [await asyncio.to_thread(index.search, query, topk) for query in queries]
        scores = body.get("return_scores", False)
        result = [[{"document": d, "score": s} if scores else d for d, s in hits] for hits in found]
        return web.json_response({"result": result})

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"documents": len(index.documents)})

    app = web.Application()
    app.add_routes([web.post("/retrieve", retrieve), web.get("/healthz", health)])
    return app


def read_corpus(path: Path) -> list[Document]:
    """Return the documents of a file of JSON lines."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="JSON lines with id and contents")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    options = parser.parse_args()
    web.run_app(application(Index(read_corpus(options.corpus))), host=options.host, port=options.port)


if __name__ == "__main__":
    main()
