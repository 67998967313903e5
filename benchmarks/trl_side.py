"""The side of TRL in ``benchmarks.against_trl``: GRPO with TRL's trainer, as a file of JSON says. And the reward.

    TRL_ENVIRONMENT/bin/python -m benchmarks.trl_side config.json

It runs in an environment of TRL's own, so it imports nothing of slime. Rows of JSON go to the file ``out``: one per
optimizer step, one per evaluation.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from pathlib import Path
from typing import Any


def digit_share(text: str, tokens: int) -> float:
    """Return how many of an answer's tokens are digits: a reward that random weights earn a little of."""
    return sum(character in "0123456789" for character in text) / max(tokens, 1)


async def digit_reward(args: Any, sample: Any, **kwargs: Any) -> float:
    """The reward of the throughput runs, for ``--custom-rm-path``."""
    return digit_share(sample.response, sample.response_length)


class Rows:
    """The file that is read by the other side, and what happened since its last row."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self.spent: dict[str, float] = {}
        self.tokens: list[int] = []
        self.rewards: list[float] = []

    def write(self, **row: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({**row, "time": time.time(), "cpu": time.process_time()}) + "\n")

    def write_step(self, step: int) -> None:
        lengths, rewards = self.tokens or [0], self.rewards or [0.0]
        self.write(
            event="step", step=step, tokens=sum(lengths), shortest=min(lengths), longest=max(lengths),
            reward=sum(rewards) / len(rewards), **self.spent,
        )  # fmt: skip
        self.spent, self.tokens, self.rewards = {}, [], []

    def timed(self, name: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - begin


def settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of GRPOConfig. What makes TRL slower and is not asked for is off."""
    task = config["task"]
    return {
        "output_dir": config["output_dir"], "seed": config["seed"], "use_cpu": True, "bf16": False,
        "model_init_kwargs": {"dtype": "float32"}, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
        "logging_steps": 10_000, "gradient_checkpointing": False, "dataloader_pin_memory": False,
        "per_device_train_batch_size": config["answers"] // config["steps_per_generation"],
        "gradient_accumulation_steps": 1, "steps_per_generation": config["steps_per_generation"],
        "num_generations": config["group"], "max_completion_length": config["length"], "temperature": 1.0,
        "generation_kwargs": None if task else {"min_new_tokens": config["length"]},
        "shuffle_dataset": task, "max_steps": config["steps"], "learning_rate": config["lr"],
        "lr_scheduler_type": config["lr_scheduler"], "warmup_steps": config["warmup_steps"],
        "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.98, "max_grad_norm": 1.0,
        "beta": config["kl"], "use_bias_correction_kl": False, "epsilon": 0.2, "epsilon_high": 0.28,
        "loss_type": "grpo", "scale_rewards": "group",
    }  # fmt: skip


def right(ids: list[int], text: str, label: str, ends: list[int]) -> float:
    """Return 1 for an answer that ended by itself and equals the label, else 0."""
    return float(bool(ids) and ids[-1] in ends and text.strip() == label)


def accuracy(trainer: Any, tokenizer: Any, rows: list[dict[str, Any]], samples: int) -> float:
    """Return the share of right answers to held-out prompts, sampled as in training."""
    import torch

    model, ends, sampling = trainer.model, trainer.eos_token_ids, copy.deepcopy(trainer.generation_config)
    sampling.num_return_sequences = samples
    model.eval()
    found = []
    for start in range(0, len(rows), 128):
        part = rows[start : start + 128]
        prompts = [row["messages"] for row in part]
        inputs = tokenizer.apply_chat_template(
            prompts, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            made = model.generate(**inputs, generation_config=sampling)
        for i, whole in enumerate(made[:, inputs["input_ids"].shape[1] :].tolist()):
            end = next((k + 1 for k, token in enumerate(whole) if token in ends), len(whole))
            text = tokenizer.decode(whole[:end], skip_special_tokens=True)
            found.append(right(whole[:end], text, part[i // samples]["label"], ends))
    model.train()
    return sum(found) / len(found)


def run(config: dict[str, Any]) -> None:
    """Train as ``config`` says."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(config["threads"])
    rows = Rows(config["out"])
    tokenizer = AutoTokenizer.from_pretrained(config["model"], padding_side="left")
    task = config["task"]

    class TimedTrainer(GRPOTrainer):
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            return rows.timed("generation", super()._generate, *args, **kwargs)

        def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
            return rows.timed("rewards", super()._calculate_rewards, *args, **kwargs)

    def reward(completions: list[Any], completion_ids: list[list[int]], label: list[str], **kwargs: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        ends = trainer.eos_token_ids
        if task:
            values = [right(*one, ends) for one in zip(completion_ids, texts, label, strict=True)]
        else:
            values = [digit_share(text, len(ids)) for text, ids in zip(texts, completion_ids, strict=True)]
        rows.tokens += map(len, completion_ids)
        rows.rewards += values
        return values

    class Report(TrainerCallback):
        began = evaluating = 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if task:
                self.evaluate(0, control)
            self.began, self.evaluating = time.time(), 0.0
            rows.write(event="begin")

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            rows.write_step(state.global_step)
            if task and state.global_step % config["evaluate_every"] == 0:
                self.evaluate(state.global_step, control)

        def evaluate(self, step: int, control: Any) -> None:
            begin = time.time()
            seconds = begin - self.began - self.evaluating if step else 0.0
            value = accuracy(trainer, tokenizer, held_out, config["samples_per_held_out"])
            self.evaluating += time.time() - begin
            rows.write(event="evaluation", step=step, accuracy=value, seconds=seconds)
            control.should_training_stop |= value >= config["target"]

    def read(path: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in Path(path).read_text().splitlines()]

    held_out = read(config["held_out"]) if task else []
    data = Dataset.from_list([{"prompt": r["messages"], "label": r["label"]} for r in read(config["prompts"])])
    trainer = TimedTrainer(
        model=config["model"], reward_funcs=reward, args=GRPOConfig(**settings(config)), train_dataset=data,
        processing_class=tokenizer, callbacks=[Report()],
    )  # fmt: skip
    trainer.train()


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text()))
