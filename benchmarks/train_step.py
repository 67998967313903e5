"""CPU seconds of one training step of the trainer against plain transformers doing the same work, in fp32 on a CPU.

Both train the same weights on the same tokens with the same loss (SFT, or the policy gradient of GRPO): forward,
backward, clipping, AdamW. The trainer's step is all of ``MegatronTrainer.train``: checks, packing, reports and metrics
included. Plain transformers takes sequences of one length as batches of the same number of tokens, and others one after
the other, which wastes nothing on padding. The two take turns, so a change of load hits both alike. What is counted is
the CPU time of the process and, with several threads, that of its main thread: it takes part in all that is done, so it
is the time of the step on an idle machine (``OMP_WAIT_POLICY=passive``, set here, keeps waiting out of it).

    python -m benchmarks.train_step --sizes 5M 24M --repeats 7
    python -m benchmarks.train_step --sizes 1M --loss grpo --threads 1 2
"""

from __future__ import annotations

import argparse
import itertools
import math
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
SIZES: dict[str, dict[str, int]] = {
    "1M": {
        "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 384,
    },
    "5M": {
        "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 5, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 4096,
    },
    "24M": {
        "hidden_size": 512, "intermediate_size": 1152, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 8192,
    },
}  # fmt: skip
LOSS_FLAGS = {
    "sft": "--loss-type sft_loss --disable-compute-advantages-and-returns",
    "grpo": "--advantage-estimator grpo --eps-clip 0.2 --entropy-coef 0 --mismatch-alarm-threshold 0"
    " --disable-rewards-normalization",
}
LR, BETAS, EPS, WEIGHT_DECAY, CLIP = 1e-4, (0.9, 0.98), 1e-8, 0.1, 1.0


@dataclass
class Batch:
    """Token ids of every sequence; the first ``prompt`` of each are its prompt."""

    name: str
    prompt: int
    sequences: list[list[int]]

    @property
    def tokens(self) -> int:
        """The tokens of all sequences."""
        return sum(map(len, self.sequences))


def batches(size: str) -> list[Batch]:
    """Return the batches of a size: many short answers for the smallest model.

    For others 4096 tokens as 8 x 512, and as sequences of the lengths that answers have (log-normal).
    """
    rng = random.Random(0)
    if size == "1M":
        prompt, sizes = 6, {"256 x 70 tokens": [70] * 256, "256 x 8 to 70": [rng.randint(8, 70) for _ in range(256)]}
    else:
        prompt, lengths = 32, list[int]()
        while (left := TOKENS - sum(lengths)) > 0:
            length = min(max(prompt + 8, int(rng.lognormvariate(5.3, 0.8))), 1024)
            lengths.append(length if left - length >= prompt + 8 else left)
        sizes = {"8 x 512 tokens": [512] * 8, f"{len(lengths)} mixed lengths": lengths}
    # Bytes: transformers leaves the embedding of the padding token, a special one, without a gradient.
    return [
        Batch(name, prompt, [[rng.randrange(256) for _ in range(length)] for length in lengths])
        for name, lengths in sizes.items()
    ]


def advantages(count: int) -> list[float]:
    return [1.0 if i % 2 else -1.0 for i in range(count)]


def make_checkpoint(out: Path, size: str) -> Path:
    from tools.tiny_model import make_tiny_checkpoint

    return make_tiny_checkpoint(out, "qwen3", max_position_embeddings=2048, **SIZES[size])


class Trainer:
    """The trainer, on one rank."""

    def __init__(self, checkpoint: Path, loss: str) -> None:
        from slime.arguments.parse import parse_args
        from slime.backends.megatron_utils.train.trainer import MegatronTrainer
        from tools.tiny_model import megatron_flags

        (checkpoint / "prompts.jsonl").write_text('{"input": "1 + 1 ="}\n')
        words = f"""--hf-checkpoint {checkpoint} --prompt-data {checkpoint}/prompts.jsonl --num-rollout 1000
            --rollout-function-path slime.rollout.sft_rollout.generate_rollout --debug-train-only {LOSS_FLAGS[loss]}
            --n-samples-per-prompt 1 --rollout-batch-size 8 --global-batch-size 8 --actor-num-gpus-per-node 1
            --use-dynamic-batch-size --max-tokens-per-gpu {TOKENS}
            --lr {LR} --lr-decay-style constant --adam-beta1 {BETAS[0]} --adam-beta2 {BETAS[1]} --adam-eps {EPS}
            --weight-decay {WEIGHT_DECAY} --clip-grad {CLIP}"""
        self.args = parse_args([*words.split(), *megatron_flags(checkpoint)])
        self.trainer = MegatronTrainer(self.args)
        self.trainer.initialize()
        self._loss = loss
        self._rollout_id = 0

    def prepare(self, batch: Batch) -> None:
        """Make the shard that the rollout manager hands over."""
        from slime.batching.columns import RolloutColumns
        from slime.batching.schedule import build_dp_schedule

        responses = [len(tokens) - batch.prompt for tokens in batch.sequences]
        count = len(responses)
        rewards = advantages(count)
        engine = {"rollout_log_probs": [[-6.0] * n for n in responses]} if self._loss == "grpo" else {}
        columns = RolloutColumns.from_train_data(
            {
                **engine,
                "tokens": batch.sequences,
                "response_lengths": responses,
                "loss_masks": [[1] * n for n in responses],
                "rewards": rewards,
                "raw_reward": rewards,
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
        (self._shard,) = columns.shards(schedule)

    def step(self) -> float:
        """Train once; return the gradient norm."""
        report = self.trainer.train(self._rollout_id, self._shard)
        self._rollout_id += 1
        return report["steps"][0]["grad_norm"]


class Plain:
    """The same with transformers and torch alone."""

    def __init__(self, checkpoint: Path, loss: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="sdpa")
        self.model.train()
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() == 1]
        self._loss = loss
        groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)

    def prepare(self, batch: Batch) -> None:
        """Divide into forward passes: one of all sequences where they have one length, else one each."""
        import torch

        same = len({len(tokens) for tokens in batch.sequences}) == 1
        rows = TOKENS // len(batch.sequences[0]) if same else 1
        parts = [slice(first, first + rows) for first in range(0, len(batch.sequences), rows)]
        signs = torch.tensor(advantages(len(batch.sequences))) if self._loss == "grpo" else None
        self._inputs = [
            (torch.tensor(batch.sequences[part]), None if signs is None else signs[part, None]) for part in parts
        ]
        self._prompt, self._count = batch.prompt, len(batch.sequences)

    def step(self) -> float:
        """Train once; return the gradient norm."""
        import torch

        self.optimizer.zero_grad()
        for tokens, signs in self._inputs:
            logits = self.model(input_ids=tokens, use_cache=False).logits[:, self._prompt - 1 : -1].float()
            chosen = torch.log_softmax(logits, dim=-1).gather(2, tokens[:, self._prompt :, None]).squeeze(2)
            terms = chosen if signs is None else signs * (chosen - chosen.detach()).exp()
            (-terms.mean(dim=1).sum() / self._count).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        return norm.item()


def cpu_seconds(step: Callable[[], Any]) -> tuple[float, float]:
    """Return CPU seconds of the process, and of this thread alone."""
    start = time.process_time(), time.thread_time()
    step()
    return time.process_time() - start[0], time.thread_time() - start[1]


def compare(size: str, loss: str, threads: list[int], repeats: int) -> None:
    import torch

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(Path(folder) / "model", size)
        ways = {"trainer": Trainer(checkpoint, loss), "plain": Plain(checkpoint, loss)}
    parameters = sum(p.numel() for p in ways["plain"].model.parameters())
    for batch in batches(size):
        for way in ways.values():
            way.prepare(batch)
        # Two steps of warming up, which also show that both do the same: the second one's is of updated weights.
        norms = [[way.step(), way.step()] for way in ways.values()]
        assert all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(*norms, strict=True)), norms
        times: dict[tuple[int, str], list[tuple[float, float]]] = {}
        for turn in range(repeats):
            for number, name in list(itertools.product(threads, ways))[:: 1 if turn % 2 else -1]:
                torch.set_num_threads(number)
                times.setdefault((number, name), []).append(cpu_seconds(ways[name].step))
        for number in threads:
            print(f"{parameters / 1e6:.1f}M parameters, {batch.name}, {loss}, {number} threads", flush=True)
            of_main = {name: [main for _, main in times[number, name]] for name in ways}
            for name, seconds in of_main.items():
                whole = statistics.median(total for total, _ in times[number, name])
                median = statistics.median(seconds)
                print(
                    f"  {name}: {batch.tokens / median:.0f} tokens per second of the main thread "
                    f"({median:.3f} s, {min(seconds):.3f} to {max(seconds):.3f}; all threads {whole:.3f} s)"
                )
            ratios = [a / b for a, b in zip(of_main["trainer"], of_main["plain"], strict=True)]
            median = statistics.median(ratios)
            print(
                f"  trainer / plain {median:.3f} ({min(ratios):.3f} to {max(ratios):.3f}, {repeats} pairs)", flush=True
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--loss", choices=list(LOSS_FLAGS), default="sft")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29571")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported
    for size in options.sizes:
        compare(size, options.loss, options.threads, options.repeats)
        _forget_layout()
    print(f"load average {os.getloadavg()}, {os.cpu_count()} cores")


def _forget_layout() -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    main()
