"""A training step of the trainer on one GPU: tokens per second, share of the card's peak, waits for the device.

The model has the shape of Qwen3-0.6B and random weights, in bf16. A step is all of ``MegatronTrainer.train``: the
micro-batches, clipping and Adam (GRPO with one step per rollout needs no earlier pass of log-probs). FLOPs are 6 per
parameter and token, the output layer included, and ``6 * layers * heads * head_dim * length`` per token for causal
attention.

    python -m benchmarks.gpu_step --lengths 512 4096 --tokens 16384 --out /tmp/step
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

PEAK_TFLOPS = 989.0  # of an H100 or H200 in bf16, without sparsity
SAMPLES_TOKENS = 65_536


def flops_per_token(length: int) -> float:
    """Return what one trained token costs in sequences of ``length`` tokens."""
    from tests.support.gpu import QWEN3_600M as m

    width, heads, kv = (
        m["hidden_size"],
        m["num_attention_heads"] * m["head_dim"],
        m["num_key_value_heads"] * m["head_dim"],
    )
    layer = width * (2 * heads + 2 * kv) + 3 * width * m["intermediate_size"]
    parameters = m["num_hidden_layers"] * layer + width * m["vocab_size"]
    return 6 * (parameters + m["num_hidden_layers"] * heads * length)


def measure(checkpoint: str, length: int, tokens: int, repeats: int, out: Path | None) -> None:
    """Print figures of a step over ``SAMPLES_TOKENS`` tokens in micro-batches of ``tokens``."""
    import torch

    from tests.support.trainer import make_shards, make_train_data
    from tests.support.trainer_ranks import new_trainer

    samples = SAMPLES_TOKENS // length
    trainer, _ = new_trainer(
        checkpoint,
        bf16=True,
        lr=1e-6,
        accumulate_allreduce_grads_in_fp32=True,
        global_batch_size=samples,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=tokens,
    )
    data = make_train_data(prompts=samples // 2, vocab_size=150_000, shortest=length - 9, longest=length - 9)
    trained = sum(map(len, data["tokens"]))
    (shard,) = make_shards(trainer.args, data, trainer.parallel_config)
    seconds = []
    for i in range(repeats + 2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        trainer.train(i, shard)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated()
    rate = trained / statistics.median(seconds[2:])
    found = {
        "length": length, "tokens": trained, "micro_batch": tokens, "seconds": seconds, "tokens_per_s": rate,
        "peak_gib": peak / 2**30, "share_of_peak": rate * flops_per_token(length) / (PEAK_TFLOPS * 1e12),
    }  # fmt: skip
    print(json.dumps(found), flush=True)
    if out is not None:
        _waits(trainer, shard, repeats + 2)
        _kernels(trainer, shard, repeats + 3, out)


def _waits(trainer: Any, shard: Any, rollout_id: int) -> None:
    """Print where the host waits for the device in a step, and how often."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        trainer.train(rollout_id, shard)
        torch.cuda.set_sync_debug_mode("default")
    places = collections.Counter(
        f"{w.filename.split('site-packages/')[-1]}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)
    )
    print(f"waits of a step: {sum(places.values())}")
    for place, count in places.most_common(25):
        print(f"  {count:5d} {place}")


def _kernels(trainer: Any, shard: Any, rollout_id: int, out: Path) -> None:
    """Write and print where the time of the device goes."""
    import torch

    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        trainer.train(rollout_id, shard)
        torch.cuda.synchronize()
    table = profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=70)
    out.mkdir(parents=True, exist_ok=True)
    (out / "kernels.txt").write_text(table)
    print("\n".join(line[:200] for line in table.splitlines()[:48]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--tokens", type=int, default=16_384, help="tokens of a micro-batch")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="folder for the profile of the first length")
    options = parser.parse_args()

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29571")
    import torch

    from tests.support.gpu import checkpoint_600m

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = str(checkpoint_600m(Path(folder) / "model"))
        for i, length in enumerate(options.lengths):
            measure(checkpoint, length, options.tokens, options.repeats, options.out if i == 0 else None)
    print(torch.cuda.get_device_name(), "torch", torch.__version__)


if __name__ == "__main__":
    main()
