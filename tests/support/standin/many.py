"""Serve any number of stand-in engines and their router from one process; prints the router's URL.

Every address of 127.0.0.0/8 is this machine, so that each engine has an address of its own on the same port, and the
client opens connections to it as to another host. Answers are made beforehand: this process is to be much cheaper than
the one that is measured.

    python -m tests.support.standin.many --engines 2048 --tokens 256 --mean-seconds 16
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import struct
import time

import orjson

from tests.support.standin.replies import LognormalTimes
from tests.support.standin.wire import Listener, Request, Response

ANSWERS = 32
"""Different answers, given in turn."""
LETTERS = "abcdefghijklmnopqrstuvwxyz     "


def make_answer(rng: random.Random, tokens: int) -> bytes:
    """Return a reply of SGLang's form: ids below 150,000, float32 log-probs, four letters per token."""
    ids = [rng.randrange(150_000) for _ in range(tokens)]
    log_probs = [struct.unpack("f", struct.pack("f", -rng.expovariate(2.0)))[0] for _ in ids]
    meta = {
        "id": f"{rng.randrange(2**128):032x}",
        "finish_reason": {"type": "stop", "matched": 151645},
        "prompt_tokens": 128,
        "weight_version": "1",
        "total_retractions": 0,
        "completion_tokens": tokens,
        "cached_tokens": 127,
        "e2e_latency": rng.expovariate(0.1),
        "output_token_logprobs": [[log_prob, token, None] for log_prob, token in zip(log_probs, ids, strict=True)],
    }
    text = "".join(rng.choices(LETTERS, k=4 * tokens))
    return orjson.dumps({"text": text, "output_ids": ids, "meta_info": meta})


class ManyEngines:
    """``count`` engines behind one router, which gives them requests in turn and answers in their place."""

    def __init__(self, count: int, tokens: int, mean_s: float, seed: int = 0) -> None:
        rng = random.Random(seed)
        self.answers = [make_answer(rng, tokens) for _ in range(ANSWERS)]
        self.aborted = orjson.dumps({"text": "", "output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}})
        self.seconds = LognormalTimes(mean_s, 0.5, seed)
        self.running: list[dict[str, asyncio.Future[bytes]]] = [{} for _ in range(count)]
        self.urls: list[str] = []
        self.counts = {"requests": 0, "looks": 0, "aborts": 0, "in_flight": 0, "most_in_flight": 0, "last_reply": 0.0}

    def listen_on(self, port: int) -> None:
        """Give every engine its address."""
        self.urls = [
            f"http://127.{1 + number // 65536}.{number // 256 % 256}.{number % 256}:{port}"
            for number in range(1, len(self.running) + 1)
        ]

    async def handle(self, request: Request) -> Response:
        """Answer one request, to the router or to an engine."""
        path = request.path.partition("?")[0]
        if path == "/generate":
            return Response(body=await self._generate(orjson.loads(request.body).get("rid", "")))
        if path == "/workers":
            return Response.of_json({"workers": [{"id": str(n), "url": url} for n, url in enumerate(self.urls)]})
        if path == "/stats":
            return Response.of_json(self.counts)
        running = self.running[self._number(request)]
        if path == "/v1/loads":
            self.counts["looks"] += 1
            return Response.of_json({"loads": [{"num_running_reqs": len(running), "num_waiting_reqs": 0}]})
        if path == "/abort_request":
            self.counts["aborts"] += 1
            body = orjson.loads(request.body)
            for rid in list(running) if body.get("abort_all") else [body.get("rid")]:
                if (answer := running.get(rid)) is not None and not answer.done():
                    answer.set_result(self.aborted)
            return Response(content_type="text/plain")
        return Response.of_json({"detail": "Not Found"}, 404)

    def _number(self, request: Request) -> int:
        """Return which engine a request was sent to."""
        host = next(value for name, value in request.headers.items() if name.lower() == "host")
        parts = host.partition(":")[0].split(".")
        return (int(parts[1]) - 1) * 65536 + int(parts[2]) * 256 + int(parts[3]) - 1

    async def _generate(self, rid: str) -> bytes:
        counts = self.counts
        number = counts["requests"] = counts["requests"] + 1
        counts["in_flight"] += 1
        counts["most_in_flight"] = max(counts["most_in_flight"], counts["in_flight"])
        running = self.running[int(number) % len(self.running)]
        loop = asyncio.get_running_loop()
        answer = running[rid] = loop.create_future()
        timer = loop.call_later(self.seconds([]), _answer, answer, self.answers[int(number) % ANSWERS])
        try:
            return await answer
        finally:
            timer.cancel()
            del running[rid]
            counts["in_flight"] -= 1
            counts["last_reply"] = time.monotonic()


def _answer(future: asyncio.Future[bytes], data: bytes) -> None:
    if not future.done():
        future.set_result(data)


async def serve(engines: ManyEngines) -> None:
    listener = Listener(engines.handle)
    url = await listener.start(host="0.0.0.0")
    engines.listen_on(int(url.rpartition(":")[2]))
    print(url, flush=True)
    gc.freeze()
    gc.disable()
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="length of replies")
    parser.add_argument("--mean-seconds", type=float, default=1.0, help="lognormal time per request")
    parser.add_argument("--seed", type=int, default=0)
    words = parser.parse_args()
    asyncio.run(serve(ManyEngines(words.engines, words.tokens, words.mean_seconds, words.seed)))


if __name__ == "__main__":
    main()
