"""Changed weights: how fast they are found and applied, and how many bytes they take.

Tensors of bf16 with a part of the elements moved by a few steps, as a small update does, are encoded as
``--update-weight-mode delta`` does, and by zstd over the XOR of the whole tensor. The cases take turns on one core;
speeds are GB of weights per CPU second, checksums included, medians of the runs with their range.

    python -m benchmarks.delta_weights --runs 5
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import zstandard

from slime.weights.delta.codec import ZSTD_LEVEL, apply, checksum, encode

PLAIN = "zstd of the XOR"
CASES: dict[str, Callable[[Any, Any], bytes]] = {
    PLAIN: lambda new, old: zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress((new ^ old).data),
    "xor": lambda new, old: _encoded(new, old, xor=True),
    "overwrite": lambda new, old: _encoded(new, old, xor=False),
}


def _encoded(new: Any, old: Any, *, xor: bool) -> bytes:
    found = encode(new, old, 2, xor=xor)
    assert found is not None
    return found.payload


def tensors(mib: int, changed: float) -> tuple[Any, Any]:
    """Return old and new bytes of ``mib`` MiB of bf16, std 0.02; one of five changed elements moves by two steps."""
    rng = np.random.default_rng(0)
    old = (rng.standard_normal(mib << 19, dtype=np.float32) * 0.02).view(np.uint32) >> 16
    old = old.astype(np.uint16)
    chance = rng.random(old.size, dtype=np.float32)
    sign = rng.choice(np.array([1, -1], np.int16), old.size)
    steps = (chance < changed).astype(np.int16) + (chance < changed / 5)
    return old.view(np.uint8), (old.view(np.int16) + steps * sign).view(np.uint8)


def cpu_seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return what ``work`` took of the processor, and its result."""
    began = time.process_time()
    result = work()
    return time.process_time() - began, result


def shown(values: list[float]) -> str:
    """Return the median, and the range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def measure(mib: int, changed: float, runs: int) -> None:
    """Print one line per case, for this part of changed elements."""
    old, new = tensors(mib, changed)
    speed: dict[str, list[float]] = {name: [] for name in CASES}
    applied: dict[str, list[float]] = {"xor": [], "overwrite": []}
    payloads: dict[str, bytes] = {}
    for _ in range(runs):
        for name, case in CASES.items():
            seconds, payloads[name] = cpu_seconds(lambda case=case: (checksum(new.data, "xxh3-128"), case(new, old))[1])  # type: ignore[misc]
            speed[name].append(new.size / seconds / 1e9)
        for name, found in applied.items():
            target, form = old.copy(), "whole" if len(payloads[name]) == new.size else "sparse"
            seconds, _ = cpu_seconds(lambda: apply(payloads[name], form, target, 2, xor=name == "xor"))  # noqa: B023
            found.append(new.size / seconds / 1e9)
            assert (target == new).all()
    for name in CASES:
        wire = 100 * len(payloads[name]) / new.size
        ratio = shown([one / plain for one, plain in zip(speed[name], speed[PLAIN], strict=True)])
        back = shown(applied[name]) if name in applied else "-"
        print(f"{100 * changed:5.2f} %  {name:16} {shown(speed[name]):20} {ratio:20} {wire:6.2f} %  {back}")


def main() -> None:
    """Measure all parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--mib", type=int, default=128, help="size of the tensor")
    parser.add_argument("--changed", type=float, nargs="+", default=[0.0104, 0.0274, 0.0698])
    args = parser.parse_args()
    print(f"{args.mib} MiB, {args.runs} runs; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"changed  {'':16} {'encoded, GB/s':20} {'to ' + PLAIN:20} {'bytes':8}  applied, GB/s")
    for changed in args.changed:
        measure(args.mib, changed, args.runs)
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
