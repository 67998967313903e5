"""Time and rounding of generalized advantage estimation: against a loop over tokens and a plain chunked form.

The plain form is written here on its own: one triangular matrix of powers for all chunks, and a loop over chunks that
carries the last sum of one to the next. Time is measured in pairs, the ways in turns first; a ratio is the median over
the pairs. The loop is slow and is measured once per shape. Rounding is the root mean square of the difference to the
loop in double precision, in units of 1e-7. Fails when the chunked form of slime is slower or less exact than the plain
one.

    OMP_NUM_THREADS=1 python -m benchmarks.gae --shapes 128x131072 512x8192
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from slime.algorithms.advantages import chunked_gae, vanilla_gae

Way = Callable[[Tensor, Tensor, float, float], tuple[Tensor, Tensor]]
GAMMA, LAMBDA, CHUNK = 0.99, 0.95, 128
CALLS_TOKENS = 2**22
EXACTNESS_LIMIT = 1.05
"""Times the rounding of the plain form: the two round in other orders."""


def plain_chunks(rewards: Tensor, values: Tensor, gamma: float, lambd: float) -> tuple[Tensor, Tensor]:
    batch, length = rewards.shape
    next_values = torch.cat([values[:, 1:], values.new_zeros(batch, 1)], dim=1)
    deltas = F.pad((rewards + gamma * next_values - values).flip(1), (0, -length % CHUNK))
    chunks = deltas.view(batch, -1, CHUNK)
    steps = torch.arange(CHUNK, device=values.device)
    apart = steps - steps.unsqueeze(1)
    decay = torch.tensor(gamma * lambd, dtype=values.dtype, device=values.device)
    within = chunks @ torch.where(apart >= 0, decay ** apart.clamp_min(0), 0.0)
    to_next, carried = decay ** (steps + 1), values.new_zeros(batch)
    whole = torch.empty_like(within)
    for index in range(chunks.size(1)):
        whole[:, index] = within[:, index] + carried.unsqueeze(1) * to_next
        carried = whole[:, index, -1]
    advantages = whole.view(batch, -1)[:, :length].flip(1)
    return advantages, advantages + values


WAYS: dict[str, Way] = {"chunked": chunked_gae, "plain chunks": plain_chunks}


def seconds(way: Way, rewards: Tensor, values: Tensor) -> float:
    """Return the seconds of a call, of several where one is short."""
    calls = max(1, CALLS_TOKENS // rewards.numel())
    _wait(rewards)
    start = time.perf_counter()
    for _ in range(calls):
        way(rewards, values, GAMMA, LAMBDA)
    _wait(rewards)
    return (time.perf_counter() - start) / calls


def rounding(way: Way, rewards: Tensor, values: Tensor, exact: Tensor) -> float:
    """Return the root mean square of the error of the advantages, in units of 1e-7."""
    advantages = way(rewards, values, GAMMA, LAMBDA)[0]
    return 1e7 * float((advantages.double() - exact).pow(2).mean().sqrt())


def _wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def report(shape: str, options: argparse.Namespace) -> bool:
    """Measure one shape and print a line; return whether slime's form is as fast and exact as the plain one."""
    batch, length = map(int, shape.split("x"))
    torch.manual_seed(0)
    rewards, values = torch.randn(2, batch, length, device=options.device)
    few = min(batch, 8)
    exact = vanilla_gae(rewards[:few].double(), values[:few].double(), GAMMA, LAMBDA)[0]
    errors = {name: rounding(way, rewards[:few], values[:few], exact) for name, way in WAYS.items()}
    errors["loop"] = rounding(vanilla_gae, rewards[:few], values[:few], exact)
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for pair in range(options.pairs + 1):  # the first one warms up
        for name in sorted(WAYS, reverse=bool(pair % 2)):
            taken = seconds(WAYS[name], rewards, values)
            times[name] += [taken] if pair else []
    loop = seconds(vanilla_gae, rewards, values)
    own, other = (times[name] for name in WAYS)
    ratios = [a / b for a, b in zip(own, other, strict=True)]
    ratio = statistics.median(ratios)
    good = ratio <= 1.0 and errors["chunked"] <= EXACTNESS_LIMIT * errors["plain chunks"]
    shown = ", ".join(f"{name} {error:.2f}" for name, error in errors.items())
    print(
        f"{shape} on {options.device}: {statistics.median(own):.4f} s, plain chunks {statistics.median(other):.4f} s, "
        f"loop {loop:.3f} s; ratio to plain chunks {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f} in "
        f"{len(ratios)} pairs), to the loop {statistics.median(own) / loop:.4f}; rounding {shown}; "
        f"load {os.getloadavg()[0]:.1f}: {'good' if good else 'TOO SLOW OR LESS EXACT'}",
        flush=True,
    )
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["128x131072", "512x8192", "64x1000"], metavar="BATCHxLENGTH")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    results = [report(shape, options) for shape in options.shapes]
    raise SystemExit(int(not all(results)))


if __name__ == "__main__":
    main()
