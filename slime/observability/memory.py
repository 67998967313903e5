"""Peak memory of each timed phase of a process. torch is imported only when a device is measured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

Bytes = dict[str, int]


class Gauge(Protocol):
    """Measures one kind of memory since the last ``reset``."""

    def reset(self) -> None: ...
    def peaks(self) -> Bytes: ...
    def now(self) -> Bytes: ...


class HostGauge:
    """Resident memory of this process. Where the kernel does not let its peak be reset, the peak is that of the run."""

    def __init__(self, proc: Path = Path("/proc/self")) -> None:
        self._proc = proc

    def reset(self) -> None:
        with contextlib.suppress(OSError):
            (self._proc / "clear_refs").write_text("5")

    def peaks(self) -> Bytes:
        """Return ``{"rss": bytes}``; nothing where there is no /proc."""
        return self._read("VmHWM")

    def now(self) -> Bytes:
        return self._read("VmRSS")

    def _read(self, field: str) -> Bytes:
        try:
            lines = (self._proc / "status").read_text().splitlines()
        except OSError:
            return {}
        found = [line.split() for line in lines if line.startswith(f"{field}:")]
        return {"rss": int(found[0][1]) * 1024} if found else {}


class CudaGauge:
    """What torch has allocated on the current device, and what it has reserved for that."""

    def reset(self) -> None:
        import torch

        torch.cuda.reset_peak_memory_stats()

    def peaks(self) -> Bytes:
        import torch

        return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}

    def now(self) -> Bytes:
        import torch

        return {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}


class PhasePeaks:
    """Watches the timers of a process: the peak of each phase, those inside of it included.

    A phase that is timed again before ``drain`` counts with its highest peak.
    """

    def __init__(self, gauges: list[Gauge]) -> None:
        self._gauges = gauges
        self._running: list[tuple[str, Bytes]] = []
        self._peaks: dict[str, Bytes] = {}

    def began(self, name: str) -> None:
        """A timer begins: what was seen up to here belongs to the phases around it."""
        if self._running:
            _raise_to(self._running[-1][1], self._read(lambda gauge: gauge.peaks()))
        for gauge in self._gauges:
            gauge.reset()
        self._running.append((name, {}))

    def ended(self, name: str) -> None:
        """The timer that began last ends."""
        _, peak = self._running.pop()
        _raise_to(peak, self._read(lambda gauge: gauge.peaks()))
        for gauge in self._gauges:
            gauge.reset()
        _raise_to(self._peaks.setdefault(name, {}), peak)
        if self._running:
            _raise_to(self._running[-1][1], peak)

    def drain(self) -> Bytes:
        """Return bytes as ``<kind>`` (now) and ``<phase>_peak_<kind>`` since the last call."""
        found = self._read(lambda gauge: gauge.now())
        for name, peak in self._peaks.items():
            found.update({f"{name}_peak_{kind}": value for kind, value in peak.items()})
        self._peaks = {}
        return found

    def _read(self, read: Callable[[Gauge], Bytes]) -> Bytes:
        return {kind: value for gauge in self._gauges for kind, value in read(gauge).items()}


def _raise_to(peak: Bytes, seen: Bytes) -> None:
    for kind, value in seen.items():
        peak[kind] = max(value, peak.get(kind, 0))
