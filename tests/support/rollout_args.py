"""Arguments and stand-ins that rollout tests share."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any


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


def rollout_args(**overrides: Any) -> SimpleNamespace:
    """Return what the rollout reads of the namespace, with the defaults of the flags."""
    values: dict[str, Any] = {
        "apply_chat_template": False,
        "apply_chat_template_kwargs": {},
        "buffer_filter_path": None,
        "custom_generate_function_path": None,
        "custom_rm_path": None,
        "dynamic_sampling_filter_path": None,
        "eval_datasets": [],
        "eval_max_context_len": None,
        "eval_max_prompt_len": None,
        "eval_reward_key": None,
        "group_rm": False,
        "hf_checkpoint": "none",
        "input_key": "input",
        "label_key": "label",
        "load": None,
        "log_multi_turn": False,
        "log_passrate": False,
        "mask_offpolicy_in_partial_rollout": False,
        "metadata_key": "metadata",
        "multimodal_keys": None,
        "n_samples_per_prompt": 2,
        "over_sampling_batch_size": 4,
        "partial_rollout": False,
        "prompt_data": None,
        "reward_key": None,
        "rm_type": "f1",
        "rm_url": None,
        "rollout_all_samples_process_path": None,
        "rollout_batch_size": 4,
        "rollout_global_dataset": True,
        "rollout_max_context_len": None,
        "rollout_max_prompt_len": None,
        "rollout_max_response_len": 16,
        "rollout_num_engines": 2,
        "rollout_request_timeout": 120.0,
        "rollout_sample_filter_path": None,
        "rollout_sample_hook_path": [],
        "rollout_seed": 42,
        "rollout_shuffle": False,
        "rollout_skip_special_tokens": False,
        "rollout_stop": None,
        "rollout_stop_token_ids": None,
        "rollout_temperature": 1.0,
        "rollout_top_k": -1,
        "rollout_top_p": 1.0,
        "router_policy": None,
        "save": None,
        "sglang_enable_deterministic_inference": False,
        "sglang_router_ip": "127.0.0.1",
        "sglang_router_port": 1,
        "sglang_server_concurrency": 64,
        "sglang_speculative_algorithm": None,
        "tool_key": "tools",
        "trust_remote_code": False,
    }
    values |= overrides
    values.setdefault("continues_own_checkpoints", values["save"] is not None and values["save"] == values["load"])
    return SimpleNamespace(**values)


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
