"""Real engines on a tiny checkpoint, for integration tests."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from slime.arguments.command_line import flags_where
from slime.backends.sglang_utils.engine import EngineProcess
from slime.backends.sglang_utils.router import RouterProcess
from tests.support.arguments import run_args


def engine_args(checkpoint: str | Path, **fields: Any) -> Namespace:
    """The arguments that an engine and a router on a machine without a GPU read."""
    args = run_args()
    vars(args).update({**engine_values(checkpoint), **fields})
    return args


def engine_values(checkpoint: str | Path) -> dict[str, Any]:
    """Return the arguments of engines that differ from those of a run."""
    given = {"sglang_max_total_tokens": 20000, "engine_ready_timeout": 180.0, "router_policy": "round_robin"}
    cpu = {flag.dest: flag.traits.without_gpu for flag in flags_where(lambda traits: traits.without_gpu)}
    engine = {name: found.value for name, found in cpu.items() if found is not None and found.given_holds}
    return {**engine, "hf_checkpoint": str(checkpoint), "device_type": "cpu", **given}


@contextlib.contextmanager
def engine_and_router(args: Namespace, folder: Path) -> Iterator[tuple[EngineProcess, RouterProcess]]:
    """Start both, with their logs in ``folder``; the router does not know the engine."""
    engine = EngineProcess(args, rank=0, host="127.0.0.1", log_path=folder / "engine.log")
    router = RouterProcess(args, "127.0.0.1", log_path=folder / "router.log")
    try:
        engine.start()
        router.start()
        router.wait_ready()
        engine.wait_ready()
        yield engine, router
    finally:
        router.stop()
        engine.stop()


class Reference:
    """Log-probs of a checkpoint by transformers: an implementation that shares nothing with the engine."""

    def __init__(self, checkpoint: str | Path, model: Any = None) -> None:
        self.model = (model or AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)).eval()

    def log_probs(self, prompt: list[int], output: list[int], temperature: float = 1.0) -> torch.Tensor:
        """Return ``[len(output)]``: log p of each output token given what is before it, at ``temperature``."""
        with torch.no_grad():
            logits = self.model(torch.tensor([prompt + output])).logits[0]
        table = torch.log_softmax(logits[len(prompt) - 1 : -1].float() / temperature, dim=-1)
        return table.gather(1, torch.tensor(output)[:, None])[:, 0]

    def are_best(self, prompt: list[int], output: list[int]) -> bool:
        """Return True if each output token is the likeliest one given what is before it."""
        with torch.no_grad():
            logits = self.model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        return bool((logits.argmax(dim=-1) == torch.tensor(output)).all())


def output_log_probs(reply: dict[str, Any]) -> torch.Tensor:
    """The log-probs of the output tokens in an engine's reply."""
    return torch.tensor([entry[0] for entry in reply["meta_info"]["output_token_logprobs"]])
