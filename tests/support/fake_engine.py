"""Stand-in engines and their router for tests of HTTP behaviour: those of the benchmarks, on a thread."""

from scripts.bench.standin import Failure, FaultMix, StandInCluster, StandInEngine, hashed_reply

FakeCluster = StandInCluster
FakeEngine = StandInEngine

__all__ = ["Failure", "FakeCluster", "FakeEngine", "FaultMix", "hashed_reply"]
