"""CPU seconds of one training step of the trainer against plain transformers doing the same work, in fp32 on one core.

Both train the same weights on the same tokens with the same loss: forward, backward, clipping, AdamW. The trainer's
step is all of ``MegatronTrainer.train``: checks, packing, reports and metrics included. Plain transformers takes
sequences of one length as one batch, and others one after the other, which wastes nothing on padding. The two take
turns, so a change of load hits both alike; what is counted is CPU time of the process.

    python -m scripts.bench.train_step --sizes 5M 24M --repeats 7
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOKENS = 4096
PROMPT = 32
FIRST_PLAIN_TOKEN = 512  # past the special ones: transformers leaves the padding token's embedding without a gradient
SIZES: dict[str, dict[str, int]] = {
    "5M": {
        "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 5, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 4096,
    },
    "24M": {
        "hidden_size": 512, "intermediate_size": 1152, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 8192,
    },
}  # fmt: skip
LR, BETAS, EPS, WEIGHT_DECAY, CLIP = 1e-4, (0.9, 0.98), 1e-8, 0.1, 1.0


@dataclass
class Batch:
    """Token ids of every sequence; the first ``PROMPT`` of each are its prompt."""

    name: str
    sequences: list[list[int]]


def batches(vocab_size: int) -> list[Batch]:
    """Return 4096 tokens as 8 x 512, and as sequences of the lengths that answers have (log-normal)."""
    rng = random.Random(0)
    lengths: list[int] = []
    while (left := TOKENS - sum(lengths)) > 0:
        length = min(max(PROMPT + 8, int(rng.lognormvariate(5.3, 0.8))), 1024)
        lengths.append(length if left - length >= PROMPT + 8 else left)
    return [
        Batch(name, [[rng.randrange(FIRST_PLAIN_TOKEN, vocab_size) for _ in range(length)] for length in sizes])
        for name, sizes in {"8 x 512 tokens": [512] * 8, f"{len(lengths)} mixed lengths": lengths}.items()
    ]


def make_checkpoint(out: Path, size: str) -> Path:
    from tools.tiny_model import make_tiny_checkpoint

    return make_tiny_checkpoint(out, "qwen3", max_position_embeddings=2048, **SIZES[size])


class Trainer:
    """The trainer, on one rank, with the loss of SFT."""

    def __init__(self, checkpoint: Path) -> None:
        from slime.arguments.parse import parse_args
        from slime.backends.megatron_utils.trainer import MegatronTrainer
        from tools.tiny_model import megatron_flags

        (checkpoint / "prompts.jsonl").write_text('{"input": "1 + 1 ="}\n')
        words = f"""--hf-checkpoint {checkpoint} --prompt-data {checkpoint}/prompts.jsonl --num-rollout 1000
            --rollout-function-path slime.rollout.sft_rollout.generate_rollout --loss-type sft_loss --debug-train-only
            --disable-compute-advantages-and-returns --n-samples-per-prompt 1 --rollout-batch-size 8
            --global-batch-size 8 --actor-num-gpus-per-node 1 --use-dynamic-batch-size --max-tokens-per-gpu {TOKENS}
            --lr {LR} --lr-decay-style constant --adam-beta1 {BETAS[0]} --adam-beta2 {BETAS[1]} --adam-eps {EPS}
            --weight-decay {WEIGHT_DECAY} --clip-grad {CLIP}"""
        self.args = parse_args([*words.split(), *megatron_flags(checkpoint)])
        self.trainer = MegatronTrainer(self.args)
        self.trainer.initialize()
        self._rollout_id = 0

    def prepare(self, batch: Batch) -> None:
        """Make the shard that the rollout manager hands over."""
        from slime.batching.columns import RolloutColumns
        from slime.batching.schedule import build_dp_schedule

        responses = [len(tokens) - PROMPT for tokens in batch.sequences]
        count = len(responses)
        columns = RolloutColumns.from_train_data(
            {
                "tokens": batch.sequences,
                "response_lengths": responses,
                "loss_masks": [[1] * n for n in responses],
                "rewards": [0.0] * count,
                "raw_reward": [0.0] * count,
                "sample_indices": list(range(count)),
                "rollout_ids": list(range(count)),
                "rollout_mask_sums": responses,
                "truncated": [0] * count,
            }
        )
        self.args.global_batch_size = count
        schedule = build_dp_schedule(
            self.args,
            self.trainer.parallel_config,
            columns.total_lengths,
            global_batch_size=count,
            rollout_indices=columns.rollout_ids,
        )
        assert schedule.num_microbatches == [1]
        (self._shard,) = columns.shards(schedule)

    def step(self) -> float:
        """Train once; return the loss."""
        report = self.trainer.train(self._rollout_id, self._shard)
        self._rollout_id += 1
        return report["steps"][0]["loss"]


class Plain:
    """The same with transformers and torch alone."""

    def __init__(self, checkpoint: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="sdpa")
        self.model.train()
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() == 1]
        groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)

    def prepare(self, batch: Batch) -> None:
        """Divide into forward passes: one of all sequences where they have one length, else one each."""
        import torch

        same = len({len(tokens) for tokens in batch.sequences}) == 1
        rows = [batch.sequences] if same else [[tokens] for tokens in batch.sequences]
        self._inputs = [torch.tensor(row) for row in rows]
        self._count = len(batch.sequences)

    def step(self) -> float:
        """Train once; return the loss."""
        import torch

        self.optimizer.zero_grad()
        total = 0.0
        for tokens in self._inputs:
            logits = self.model(input_ids=tokens, use_cache=False).logits[:, PROMPT - 1 : -1].float()
            log_probs = torch.log_softmax(logits, dim=-1).gather(2, tokens[:, PROMPT:, None]).squeeze(2)
            loss = -log_probs.mean(dim=1).sum() / self._count
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        return total


def cpu_seconds(step: Callable[[], Any]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def compare(size: str, repeats: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(Path(folder) / "model", size)
        ways = {"trainer": Trainer(checkpoint), "plain": Plain(checkpoint)}
    parameters = sum(p.numel() for p in ways["plain"].model.parameters())
    for batch in batches(SIZES[size]["vocab_size"]):
        for way in ways.values():
            way.prepare(batch)
        # Two steps of warming up, which also show that both do the same: the second loss is that of updated weights.
        losses = [[way.step(), way.step()] for way in ways.values()]
        assert all(abs(a - b) < 1e-4 for a, b in zip(*losses, strict=True)), losses
        times: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(repeats):
            for name in list(ways)[:: 1 if turn % 2 else -1]:
                times[name].append(cpu_seconds(ways[name].step))
        ratios = [a / b for a, b in zip(times["trainer"], times["plain"], strict=True)]
        said = ", ".join(
            f"{name} {TOKENS / statistics.median(t):.0f} tokens per CPU second ({min(t):.2f} to {max(t):.2f} s)"
            for name, t in times.items()
        )
        print(
            f"{parameters / 1e6:.1f}M parameters, {batch.name}: {said}; trainer / plain "
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}, {repeats} pairs)",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()

    import torch

    torch.set_num_threads(1)
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29571")
    for size in options.sizes:
        compare(size, options.repeats)
        _forget_layout()
    print(f"load average {os.getloadavg()}, {os.cpu_count()} cores, 1 thread")


def _forget_layout() -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    main()
