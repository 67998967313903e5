"""Time and extra memory of log-probs and entropy, forward and backward: chunked against plain torch.

Every measurement has a process of its own, because peak memory is a high-water mark. "Extra" is the peak above what the
logits and their gradient need.

    python scripts/bench/log_probs.py --tokens 4096 --vocab 32768 --repeats 3 [--device cuda --dtype bfloat16]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from slime.algorithms.log_probs import log_probs_and_entropy

Result = tuple[Tensor, Tensor | None]
CASES = ("log-probs", "with entropy", "with entropy gradient")


def chunked(logits: Tensor, targets: Tensor, case: str) -> Result:
    return log_probs_and_entropy(
        logits, targets, with_entropy=case != "log-probs", entropy_grad=case == "with entropy gradient"
    )


def plain(logits: Tensor, targets: Tensor, case: str) -> Result:
    log_p = torch.log_softmax(logits.float(), dim=-1)
    log_probs = log_p.gather(1, targets.unsqueeze(1)).squeeze(1)
    if case == "log-probs":
        return log_probs, None
    with torch.set_grad_enabled(case == "with entropy gradient"):
        return log_probs, -(log_p.exp() * log_p).sum(-1)


WAYS: dict[str, Callable[[Tensor, Tensor, str], Result]] = {"chunked": chunked, "plain": plain}


def measure(options: argparse.Namespace) -> dict[str, float | list[float]]:
    """Run one way in this process; seconds per repeat and peak extra MiB."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = torch.device(options.device)
    logits = torch.randn(options.tokens, options.vocab, device=device, dtype=getattr(torch, options.dtype))
    targets = torch.randint(options.vocab, (options.tokens,), device=device)
    logits.requires_grad_()
    # the gradient exists in every way: allocate it before the mark
    logits.grad = torch.zeros_like(logits)
    before = _peak_bytes(device)
    seconds, forward_seconds, checks = [], [], []
    for _ in range(options.repeats):
        _wait(device)
        start = time.perf_counter()
        log_probs, entropy = WAYS[options.way](logits, targets, options.case)
        _wait(device)
        middle = time.perf_counter()
        loss = log_probs.sum() + (entropy.sum() if entropy is not None and entropy.requires_grad else 0.0)
        (grad,) = torch.autograd.grad(loss, logits)
        _wait(device)
        seconds.append(time.perf_counter() - start)
        forward_seconds.append(middle - start)
        checks.append(float(log_probs.double().mean()))
        del grad, loss, log_probs, entropy
    extra = _peak_bytes(device) - before - logits.nbytes  # autograd.grad allocates a gradient of its own
    return {"seconds": seconds, "forward": forward_seconds, "extra_mib": extra / 2**20, "mean": checks[0]}


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--way", choices=list(WAYS), help=argparse.SUPPRESS)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(options)))
        return
    size = options.tokens * options.vocab * getattr(torch, options.dtype).itemsize / 2**20
    print(f"{options.tokens} tokens x {options.vocab} vocabulary, {options.dtype} on {options.device}: {size:.0f} MiB")
    for case in CASES:
        results = {way: _in_own_process(options, way, case) for way in WAYS}
        assert abs(results["chunked"]["mean"] - results["plain"]["mean"]) < 1e-4, results
        for way, result in results.items():
            times = result["seconds"]
            ratio = statistics.median(times) / statistics.median(results["plain"]["seconds"])
            print(
                f"{case:22} {way:8} forward {statistics.median(result['forward']):6.3f} s, with backward "
                f"{statistics.median(times):6.3f} s ({min(times):.3f} to {max(times):.3f}, {ratio:.2f} x plain), "
                f"extra {result['extra_mib']:7.0f} MiB"
            )
    print(f"load average {os.getloadavg()}, {os.cpu_count()} cores, 1 thread")


def _in_own_process(options: argparse.Namespace, way: str, case: str) -> dict:
    command = [sys.executable, __file__, "--way", way, "--case", case, "--device", options.device]
    command += ["--tokens", str(options.tokens), "--vocab", str(options.vocab), "--dtype", options.dtype]
    command += ["--repeats", str(options.repeats)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError(f"{way} ({case}) failed:\n{done.stderr}")
    return json.loads(done.stdout)


if __name__ == "__main__":
    main()
