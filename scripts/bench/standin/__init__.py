"""A stand-in for SGLang engines and their router, for benchmarks and fault tests only.

It speaks the wire format of the endpoints that slime uses and computes nothing: replies, times and faults are
configured. ``python -m scripts.bench.standin --help`` serves one from the command line.
"""

from scripts.bench.standin.cluster import ServerThread, StandInCluster
from scripts.bench.standin.engine import Failure, FaultMix, StandInEngine
from scripts.bench.standin.replies import (
    FixedReply,
    LognormalLengths,
    LognormalTimes,
    hashed_reply,
)
from scripts.bench.standin.router import StandInRouter

__all__ = [
    "Failure",
    "FaultMix",
    "FixedReply",
    "LognormalLengths",
    "LognormalTimes",
    "ServerThread",
    "StandInCluster",
    "StandInEngine",
    "StandInRouter",
    "hashed_reply",
]
