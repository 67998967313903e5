"""A process whose memory others write to: prints where it is, and after each line that it reads a checksum of it."""

from __future__ import annotations

import ctypes
import json
import sys

import xxhash

from slime.weights.p2p.agents import make_agent


def main() -> None:
    """Arguments: the backend, and bytes."""
    memory = (ctypes.c_char * int(sys.argv[2]))()
    agent = make_agent(sys.argv[1])
    agent.register([(ctypes.addressof(memory), len(memory))], memory)
    print("READY " + json.dumps([agent.address(), ctypes.addressof(memory)]), flush=True)
    for _ in sys.stdin:
        print("SUM " + xxhash.xxh3_128_hexdigest(memory), flush=True)


if __name__ == "__main__":
    main()
