"""A stand-in engine in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


@contextmanager
def standin_process(*words: object, module: str = "tests.support.standin") -> Iterator[str]:
    """Yield the URL of a stand-in that is served with these command-line words until the block ends."""
    command = [sys.executable, "-m", module, *map(str, words)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        if not url:
            raise RuntimeError(f"{' '.join(command)} ended with {process.wait(10)}")
        yield url
    finally:
        process.terminate()
        process.wait(10)
        if process.stdout is not None:
            process.stdout.close()


def stats(url: str) -> dict[str, float]:
    """Counts of the stand-in at ``url`` since it started: requests, tokens, ``slot_seconds``; ``now`` is its clock."""
    with urllib.request.urlopen(f"{url}/stats", timeout=30) as reply:
        counts: dict[str, float] = json.load(reply)
        return counts
