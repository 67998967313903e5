"""The experts of the small version: rules behind OpenAI's chat completions.

    python -m examples.tool_orchestra.expert_server --corpus corpus.jsonl --port 8001

``cheap`` knows the answers to easy questions only, or what a document in its prompt says; ``dear`` and ``slow`` know
all. Asked for a query, all write the place that is asked about. A reply has one token.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from aiohttp import web

from examples.search_r1.retrieval_server import read_corpus

PRICING = {
    "cheap": {"input": 0.0, "output": 1e6, "latency": 2.0},
    "dear": {"input": 0.0, "output": 10e6, "latency": 1.0},
    "slow": {"input": 0.0, "output": 3e6, "latency": 10.0},
}
"""A million tokens cost a million times as much as the one of a reply."""
_WORD = re.compile(r"\w+")


def reply(model: str, text: str, facts: dict[str, str]) -> str:
    """Return what a model says to ``text``, in which the first word that is a place is asked about."""
    place = next((word for word in _WORD.findall(text) if word in facts), None)
    if place is None:
        return "unknown"
    if "search query" in text:
        return place
    knows = model != "cheap" or "easy" in text.split() or f"{place} has" in text
    return f"<answer>{facts[place] if knows else 'unknown'}</answer>"


def application(facts: dict[str, str]) -> web.Application:
    """Return the server; ``facts`` are {place: thing}."""

    async def complete(request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json()
        message = {"role": "assistant", "content": reply(body["model"], body["messages"][-1]["content"], facts)}
        return web.json_response(
            {"choices": [{"index": 0, "message": message}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
        )

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"models": list(PRICING)})

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", complete), web.get("/healthz", health)])
    return app


def facts_of(corpus: Path) -> dict[str, str]:
    """Return {place: thing} of the documents ``"place"\\nplace has thing``."""
    return {document["id"]: document["contents"].split()[-1] for document in read_corpus(corpus)}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="JSON lines with id and contents")
    parser.add_argument("--port", type=int, default=8001, help="port of loopback (default: %(default)s)")
    options = parser.parse_args()
    web.run_app(application(facts_of(options.corpus)), host="127.0.0.1", port=options.port)


if __name__ == "__main__":
    main()
