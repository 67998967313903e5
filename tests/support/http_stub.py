"""A tiny HTTP server that answers from a script, for tests of the blocking clients."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Seen:
    """One request: body parsed as JSON, None when empty."""

    method: str
    path: str
    body: Any
    authorization: str | None


Reply = tuple[int, Any]
Answer = Callable[[Seen], Reply]


@dataclass
class HttpStub:
    """``answer`` maps a request to (status, JSON body); ``seen`` keeps the requests."""

    url: str
    answer: Answer
    seen: list[Seen] = field(default_factory=list)


@contextmanager
def http_stub(answer: Answer, port: int = 0) -> Iterator[HttpStub]:
    """Serve on ``port`` of loopback, or a free one, until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            raw = self.rfile.read(size)
            seen = Seen(self.command, self.path, json.loads(raw) if raw else None, self.headers.get("Authorization"))
            stub.seen.append(seen)
            status, body = stub.answer(seen)
            data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_DELETE = handle_any

        def log_message(self, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    stub = HttpStub(f"http://127.0.0.1:{server.server_address[1]}", answer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
