"""Arguments and stand-ins that rollout tests share."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.arguments import run_args


class CharTokenizer:
    """One token per character, its code point; the chat template is ``role:content`` lines."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(chr(i) for i in ids)

    def __call__(self, text: list[str], add_special_tokens: bool = True) -> dict[str, list[list[int]]]:
        return {"input_ids": [self.encode(t) for t in text]}

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return "".join(f"{m['role']}:{m['content']}\n" for m in messages)


def rollout_args(**overrides: Any) -> Namespace:
    """Return parsed arguments as the rollout reads them: two engines, groups of two, nothing read from disk."""
    values: dict[str, Any] = {
        "hf_checkpoint": "none",
        "label_key": "label",
        "load": None,
        "n_samples_per_prompt": 2,
        "prompt_data": None,
        "rm_type": "f1",
        "rollout_max_response_len": 16,
        "rollout_num_engines": 2,
        "rollout_request_timeout": 120.0,
        "router_policy": None,
        "save": None,
        "sglang_router_ip": "127.0.0.1",
        "sglang_router_port": 1,
        "sglang_server_concurrency": 64,
    }
    values |= overrides
    values.setdefault("continues_own_checkpoints", values["save"] is not None and values["save"] == values["load"])
    return run_args(**values)


def write_prompts(path: Path, count: int) -> Path:
    """Write ``count`` prompts ``p0``, ``p1``, ... with labels ``l0``, ... as JSON lines."""
    path.write_text("".join(json.dumps({"input": f"p{i}", "label": f"l{i}"}) + "\n" for i in range(count)))
    return path


def eval_config(path: str, name: str, **fields: Any) -> SimpleNamespace:
    """The settings of one evaluation data set of prompts with ``input`` and ``label``; ``fields`` replace them."""
    values = {
        "name": name, "path": path, "cache_key": (name, path), "input_key": "input", "label_key": "label",
        "tool_key": None, "metadata_key": "metadata", "n_samples_per_eval_prompt": 2, "temperature": 0.0, "top_p": 1.0,
        "top_k": -1, "max_response_len": 5, "min_new_tokens": 1, "repetition_penalty": 1.1, "custom_rm_path": None,
        "custom_generate_function_path": None, "inject_metadata": lambda md: {**(md or {}), "rm_type": "f1"},
    }  # fmt: skip
    return SimpleNamespace(**{**values, **fields})
