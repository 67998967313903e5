"""A stand-in for SGLang engines and their router, for benchmarks and fault tests only.

It speaks the wire format of the endpoints that slime uses and computes nothing: replies, times and faults are
configured. ``python -m tests.support.standin --help`` serves one from the command line.
"""

from tests.support.standin.cluster import ServerThread, StandInCluster
from tests.support.standin.engine import Failure, FaultMix, StandInEngine
from tests.support.standin.replies import (
    FixedReply,
    LognormalLengths,
    LognormalTimes,
    hashed_reply,
)
from tests.support.standin.router import StandInRouter

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
