"""Hooks that integration tests give to ``train.py`` by path."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from typing import Any

import torch
import torch.distributed as dist

from slime.rollout.sglang_rollout import get_model_url
from slime.servers.http_utils import post
from slime.utils.types import Sample

JUDGED_TEXT = list(range(20, 40))


async def parity_reward(args: Any, sample: Sample, **_: Any) -> float:
    """Return 1.0 when the sum of the tokens is odd: a random model gets it half the time."""
    return float(sum(sample.tokens) % 2)


async def judged_reward(args: Any, sample: Sample, **_: Any) -> float:
    """Return 1.0 where the frozen model ``judge`` continues the sample with an odd token.

    What it thinks of a fixed text is appended to ``judge.jsonl`` of the run: it must stay the same throughout.
    """
    greedy = {"sampling_params": {"temperature": 0.0, "max_new_tokens": 1}, "return_logprob": True}
    url = get_model_url(args, "judge")
    verdict, fixed = await asyncio.gather(
        post(url, {"input_ids": sample.tokens, **greedy}), post(url, {"input_ids": JUDGED_TEXT, **greedy})
    )
    ((log_prob, token, *_rest),) = fixed["meta_info"]["output_token_logprobs"]
    with open(os.path.join(args.run_dir, "judge.jsonl"), "a") as file:
        file.write(json.dumps({"url": url, "token": token, "log_prob": log_prob}) + "\n")
    return float(verdict["output_ids"][0] % 2)


async def compared_reward(args: Any, sample: Sample, **_: Any) -> float:
    """``parity_reward``, after the models ``actor`` and ``regular`` have continued the prompt greedily.

    A pair of answers is appended to ``compared.jsonl`` of the run.
    """
    prompt = sample.tokens[: len(sample.tokens) - sample.response_length]
    greedy = {"temperature": 0.0, "max_new_tokens": 1 + sample.index % 3 * 12, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": greedy, "return_logprob": True}
    replies = await asyncio.gather(*(post(get_model_url(args, name), dict(body)) for name in ("actor", "regular")))
    answers = [
        {
            "tokens": reply["output_ids"],
            "log_probs": [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]],
            "version": reply["meta_info"]["weight_version"],
            "finish": reply["meta_info"]["finish_reason"]["type"],
        }
        for reply in replies
    ]
    with open(os.path.join(args.run_dir, "compared.jsonl"), "a") as file:
        file.write(json.dumps(answers) + "\n")
    return await parity_reward(args, sample)


async def every_other(args: Any, sample: Sample, **_: Any) -> float:
    """Return 1.0 for every other sample: each group of a few has both, so that each step has a gradient."""
    return float(sample.index % 2)


async def no_reward(args: Any, sample: Sample, **_: Any) -> float:
    """Return 0.0: what is learned comes from elsewhere."""
    return 0.0


def fail_on_rank_1(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """``--rollout-data-postprocess-path`` that breaks on one rank, while the other waits for it in a collective."""
    if dist.get_rank() == 1 and rollout_id == 1:
        raise ValueError("the sauce is burnt in rank 1")


def note_training(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """``--rollout-data-postprocess-path`` that notes a while within the training of each rollout."""
    began = time.time()
    time.sleep(0.3)
    with open(os.path.join(args.run_dir, "training.jsonl"), "a") as file:
        file.write(json.dumps({"rollout": rollout_id, "from": began, "to": time.time()}) + "\n")


def stay_while_asked(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """``--rollout-data-postprocess-path`` that stays in training, says ``stays``, while the run has a file ``stay``."""
    while os.path.exists(os.path.join(args.run_dir, "stay")):
        with open(os.path.join(args.run_dir, "stays"), "w"):
            time.sleep(0.05)


def hold(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """``--rollout-data-postprocess-path`` that stays in rollout ``SLIME_TEST_HOLD_AT``: time to kill the run.

    It leaves a ``torch_shm_manager`` behind, a daemon that outlives whoever made PyTorch start it.
    """
    if rollout_id == int(os.environ.get("SLIME_TEST_HOLD_AT", "-1")):
        torch.multiprocessing.set_sharing_strategy("file_system")
        shared = torch.ones(8).share_memory_()
        assert shared.is_shared()
        logging.getLogger(__name__).info("holding rollout %d", rollout_id)
        time.sleep(600)


def note_trained(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """``--rollout-data-postprocess-path`` that appends what is trained on to the file ``SLIME_TEST_TRAINED``."""
    line = {"rollout": rollout_id, "samples": [int(index) for index in rollout_data["sample_indices"]]}
    file = os.open(os.environ["SLIME_TEST_TRAINED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, (json.dumps(line) + "\n").encode())
        os.fsync(file)
    finally:
        os.close(file)


def note_weight_files(args: Any, version_dir: str, rollout_engines: list[Any]) -> None:
    """``--custom-update-weight-post-write-path`` that appends its arguments to the file ``SLIME_TEST_HOOKED``."""
    complete = os.path.isfile(os.path.join(version_dir, "model.safetensors.index.json"))
    line = {"directory": version_dir, "engines": len(rollout_engines), "complete": complete}
    with open(os.environ["SLIME_TEST_HOOKED"], "a") as file:
        file.write(json.dumps(line) + "\n")


def note_pull(source_dir: str, target_version: int) -> None:
    """``--sglang-custom-pull-weights-pre-read-hook`` that appends its arguments to the file ``SLIME_TEST_HOOKED``."""
    with open(os.environ.get("SLIME_TEST_HOOKED", os.devnull), "a") as file:
        file.write(f"{source_dir} {target_version}\n")
