"""Time and memory of log-probs and entropy, forward and backward: chunked against plain torch.

Memory is what a process of its own holds at most beyond the logits and their gradient: resident memory on a CPU, the
allocator's on a GPU; the limit is 1.5 chunks of float32. Time is measured in pairs, the two ways one after the other in
the same process, in turns first; the ratio is the median over the pairs. Where plain torch would need more than
``--gib``, the pairs have fewer tokens.

    OMP_NUM_THREADS=1 python benchmarks/log_probs.py --vocab 32768 151936 [--device cuda --dtype bfloat16]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from slime.algorithms.log_probs import log_probs_and_entropy

Result = tuple[Tensor, Tensor | None]
CASES = ("log-probs", "with entropy", "with entropy gradient")
MEMORY_LIMIT, TIME_LIMIT = 1.5, 1.1
PLAIN_COPIES = {"log-probs": 3.1, "with entropy": 4.1, "with entropy gradient": 6.1}
"""Float32 tensors of the size of the logits that plain torch holds at once, besides logits and gradient."""


def chunked(logits: Tensor, targets: Tensor, case: str, chunk_size: int) -> Result:
    return log_probs_and_entropy(
        logits,
        targets,
        chunk_size=chunk_size,
        with_entropy=case != "log-probs",
        entropy_grad=case == "with entropy gradient",
    )


def plain(logits: Tensor, targets: Tensor, case: str, chunk_size: int) -> Result:
    del chunk_size
    log_p = torch.log_softmax(logits.float(), dim=-1)
    log_probs = log_p.gather(1, targets.unsqueeze(1)).squeeze(1)
    if case == "log-probs":
        return log_probs, None
    with torch.set_grad_enabled(case == "with entropy gradient"):
        return log_probs, -(log_p.exp() * log_p).sum(-1)


WAYS: dict[str, Callable[[Tensor, Tensor, str, int], Result]] = {"chunked": chunked, "plain": plain}


def step(way: str, options: argparse.Namespace, logits: Tensor, targets: Tensor) -> tuple[float, float]:
    """Go forward and backward once; return seconds and the mean log-prob."""
    _wait(logits.device)
    start = time.perf_counter()
    log_probs, entropy = WAYS[way](logits, targets, options.case, options.chunk_size)
    loss = log_probs.sum() + (entropy.sum() if entropy is not None and entropy.requires_grad else 0.0)
    torch.autograd.grad(loss, logits)
    _wait(logits.device)
    return time.perf_counter() - start, float(log_probs.double().mean())


def make(options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device, width = torch.device(options.device), options.vocab[0]
    logits = torch.randn(options.tokens, width, device=device, dtype=getattr(torch, options.dtype), requires_grad=True)
    return logits, torch.randint(width, (options.tokens,), device=device)


def measure_memory(options: argparse.Namespace) -> dict[str, float]:
    """Peak beyond logits and gradient, in chunks of float32, after a small step that pays what is paid once."""
    logits, targets = make(options)
    step(options.way, options, logits[:1].detach().requires_grad_(), targets[:1])
    before = _reset_peak(logits.device)
    step(options.way, options, logits, targets)
    extra = _peak_bytes(logits.device) - before - logits.nbytes
    return {"extra_mib": extra / 2**20, "chunks": extra / (options.chunk_size * options.vocab[0] * 4)}


def measure_time(options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of both ways by pair; one pair to warm up does not count."""
    logits, targets = make(options)
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    means: dict[str, float] = {}
    for pair in range(options.pairs + 1):
        for way in sorted(WAYS, reverse=bool(pair % 2)):
            seconds, means[way] = step(way, options, logits, targets)
            found[way] += [seconds] if pair else []
    assert abs(means["chunked"] - means["plain"]) < 1e-4, means
    return found


def _reset_peak(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins again
    return _resident("VmRSS")


def _peak_bytes(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _resident("VmHWM")


def _resident(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) * 1024


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocab", type=int, nargs="+", default=[32768, 151936])
    parser.add_argument("--chunk-size", type=int, default=1024)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--gib", type=float, default=11.0, help="memory that plain torch may use")
    parser.add_argument("--case", choices=CASES, help="only this one")
    parser.add_argument("--way", choices=list(WAYS), help=argparse.SUPPRESS)
    parser.add_argument("--what", choices=("memory", "time"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.what:
        print(json.dumps(measure_memory(options) if options.what == "memory" else measure_time(options)))
        return
    failed = False
    for vocab in options.vocab:
        for case in [options.case] if options.case else CASES:
            failed |= not report(options, vocab, case)
    raise SystemExit(int(failed))


def report(options: argparse.Namespace, vocab: int, case: str) -> bool:
    """Measure one case and print a line; return whether both limits hold."""
    tokens = _tokens_that_fit(options, vocab, case)
    memory = _in_own_process(options, vocab, case, options.tokens, "--what", "memory", "--way", "chunked")
    times = _in_own_process(options, vocab, case, tokens, "--what", "time")
    ratios = [own / other for own, other in zip(times["chunked"], times["plain"], strict=True)]
    ratio = statistics.median(ratios)
    seconds = {way: statistics.median(times[way]) for way in WAYS}
    good = memory["chunks"] <= MEMORY_LIMIT and ratio <= TIME_LIMIT
    print(
        f"{options.dtype} on {options.device}, vocabulary {vocab}, {case}: extra memory at {options.tokens} tokens "
        f"{memory['extra_mib']:.0f} MiB = {memory['chunks']:.2f} chunks of {options.chunk_size}; {tokens} tokens in "
        f"{seconds['chunked']:.4f} s, plain {seconds['plain']:.4f} s, ratio {ratio:.2f} ({min(ratios):.2f} to "
        f"{max(ratios):.2f} in {len(ratios)} pairs), load {os.getloadavg()[0]:.1f}: {'good' if good else 'TOO MUCH'}",
        flush=True,
    )
    return good


def _tokens_that_fit(options: argparse.Namespace, vocab: int, case: str) -> int:
    size = getattr(torch, options.dtype).itemsize
    per_token = vocab * (2 * size + 4 * PLAIN_COPIES[case])
    tokens = options.tokens
    while tokens > 1 and tokens * per_token > options.gib * 2**30:
        tokens //= 2
    return tokens


def _in_own_process(options: argparse.Namespace, vocab: int, case: str, tokens: int, *words: str) -> dict:
    command = [sys.executable, __file__, *words, "--case", case, "--device", options.device, "--dtype", options.dtype]
    command += ["--tokens", str(tokens), "--vocab", str(vocab), "--chunk-size", str(options.chunk_size)]
    command += ["--pairs", str(options.pairs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        raise RuntimeError(f"{case} failed:\n{done.stderr}")
    return json.loads(done.stdout)


if __name__ == "__main__":
    main()
