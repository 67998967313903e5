"""Serve one stand-in engine until the process ends; prints its URL.

python -m tests.support.standin --tokens 16 --mean-seconds 0.2 --sigma 0.8
"""

from __future__ import annotations

import argparse
import asyncio
import gc

from tests.support.standin.engine import Failure, FaultMix, StandInEngine
from tests.support.standin.replies import FixedReply, LognormalLengths, LognormalTimes
from tests.support.standin.wire import Listener

FAILURES = {
    "400": Failure(400, b'{"error":{"message":"The input is longer than the context length"}}'),
    "503": Failure(503, b'{"error":{"message":"busy"}}'),
    "cut": Failure(cut=True),
    "truncated": Failure(truncated=True),
    "broken": Failure(200, b'{"text": "hal'),
    "hang": Failure(hang=True),
    **{spoil: Failure(spoil=spoil) for spoil in ("nan", "short", "old")},
}


def engine_of(words: argparse.Namespace) -> StandInEngine:
    """The engine that the command line describes."""
    engine = StandInEngine(
        reply=FixedReply(words.tokens), slots=words.slots, max_waiting=words.max_waiting, record=False
    )
    if words.p99_tokens:
        engine.reply = LognormalLengths(words.tokens, words.p99_tokens, words.longest, words.seed)
        engine.delay = words.token_seconds
    elif words.mean_seconds:
        engine.duration = LognormalTimes(words.mean_seconds, words.sigma, words.seed)
    rates = [(float(rate), FAILURES[name]) for name, _, rate in (fault.partition("=") for fault in words.fault)]
    engine.faults = FaultMix(rates, words.seed) if rates else None
    return engine


async def serve(engine: StandInEngine, port: int) -> None:
    listener = Listener(engine.handle)
    print(await listener.start(port), flush=True)
    gc.freeze()
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--tokens", type=int, default=16, help="length of replies; with --p99-tokens their median")
    parser.add_argument("--p99-tokens", type=float, help="lognormal lengths with this 99th percentile")
    parser.add_argument("--longest", type=int, default=100_000, help="of lognormal lengths")
    parser.add_argument("--token-seconds", type=float, default=0.0, help="time per token of lognormal lengths")
    parser.add_argument("--mean-seconds", type=float, default=0.0, help="lognormal time per request; 0: at once")
    parser.add_argument("--sigma", type=float, default=0.8, help="of the logarithm of the time")
    parser.add_argument("--slots", type=int, help="requests that run at a time; the others wait")
    parser.add_argument("--max-waiting", type=int, help="requests that wait; more are answered 503")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--fault", action="append", default=[], metavar="KIND=SHARE", help=f"of {', '.join(FAILURES)}; repeatable"
    )
    words = parser.parse_args()
    asyncio.run(serve(engine_of(words), words.port))


if __name__ == "__main__":
    main()
