"""Calls of tracing, logging, arguments, engine configurations, accelerators, launch helpers and Adam without state."""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.backends.sglang_utils.sglang_config import ModelConfig, ServerGroupConfig
from slime.observability import trace_utils
from slime.utils.accelerator import CpuAccelerator
from slime.utils.types import Sample
from tests.support.reference_calls import Call, check_equal

TRACE, LOGGING = "slime.observability.trace_utils.", "slime.observability.logging_utils."
CONFIG, DEVICE = "slime.backends.sglang_utils.sglang_config.", "slime.utils.accelerator."
COMMAND = "slime.utils.external_utils.command_utils."


def events(sample: Any) -> list[tuple[str, str]]:
    return [(event["type"], event["name"]) for event in sample.trace["events"]]


def traced() -> Sample:
    sample = Sample(index=1)
    trace_utils.trace_event(sample, "seen")
    return sample


def spanned(span: Any, _: Any, given: dict[str, Any]) -> None:
    with span:
        pass
    assert events(given["target"]) == [("span_start", "work"), ("span_end", "work")]
    if "attrs" in given:
        assert given["target"].trace["events"][0]["attrs"] == given["attrs"]


def one_event(_: Any, __: Any, given: dict[str, Any]) -> None:
    assert events(given["target"]) == [("event", "work")]


def decorates(decorate: Any, _: Any, given: dict[str, Any]) -> None:
    sample = Sample(index=1)

    @decorate
    def work(sample: Sample) -> int:
        return 4

    assert work(sample) == 4
    assert events(sample) == [("span_start", "work"), ("span_end", "work")]
    if "attrs_getter" in given:
        assert sample.trace["events"][0]["attrs"] == {"index": 1}


def next_attempt(_: Any, __: Any, given: dict[str, Any]) -> None:
    trace_utils.trace_event(given["target"], "again")
    assert [event["attempt"] for event in given["target"].trace["events"]] == [0, 1]


TRACE_CALLS = [
    Call(TRACE + "trace_span", lambda: {"target": Sample(index=1), "name": "work"}, spanned),
    Call(TRACE + "trace_span", lambda: {"target": Sample(index=1), "name": "work", "attrs": {"a": 1}}, spanned),
    Call(TRACE + "trace_event", lambda: {"target": Sample(index=1), "name": "work", "attrs": {"a": 1}}, one_event),
    Call(TRACE + "trace_function", {"name": "work"}, decorates),
    Call(
        TRACE + "trace_function",
        {"name": "work", "target": "sample", "attrs_getter": lambda sample: {"index": sample.index}},
        decorates,
    ),
    Call(TRACE + "trace_next_attempt", lambda: {"target": traced()}, next_attempt),
    Call(
        TRACE + "bind_trace", lambda: {"sample": traced()}, lambda h: h.carrier["events"][0]["name"] == "seen" or 1 / 0
    ),
    Call(
        TRACE + "bind_trace_carrier",
        lambda: {"sample": Sample(), "carrier": traced().trace},
        lambda _, __, given: events(given["sample"]) == [("event", "seen")] or pytest.fail("not bound"),
    ),
    Call(
        TRACE + "export_trace",
        lambda: {"target": traced()},
        lambda found, _, given: found["trace_id"] == given["target"].trace["trace_id"] or pytest.fail(str(found)),
    ),
    Call(
        TRACE + "import_trace",
        lambda: {"carrier": trace_utils.export_trace(traced())},
        lambda handle, _, given: handle.carrier["trace_id"] == given["carrier"]["trace_id"] or 1 / 0,
    ),
    Call(
        TRACE + "build_sglang_meta_trace_attrs",
        {"meta_info": {"finish_reason": {"type": "stop"}, "prompt_tokens": 3}},
        lambda found: (isinstance(found, dict) and found) or pytest.fail("nothing"),
    ),
    Call(TRACE + "TraceHandle", {"carrier": {"version": 1}}, lambda h: h.carrier == {"version": 1} or 1 / 0),
]

LOG_CALLS = [
    *(
        Call(LOGGING + "configure_logger", given, lambda _: logging.getLogger().handlers or pytest.fail("no handler"))
        for given in ({}, {"prefix": "driver"})
    ),
    Call("slime.utils.timer_utils.timer", {"name": "work"}, lambda block: block.__enter__ and block.__exit__ and None),
    Call(
        "slime.utils.metric_utils.compute_rollout_step",
        {
            "args": SimpleNamespace(
                wandb_always_use_train_step=True, rollout_batch_size=4, n_samples_per_prompt=2, global_batch_size=2
            ),
            "rollout_id": 3,
        },
        3 * 4 * 2 // 2,
    ),
]


def yaml_file(text: str) -> str:
    path = Path(tempfile.mkdtemp()) / "config.yaml"
    path.write_text(text)
    return str(path)


MODELS = """
sglang:
  - name: actor
    server_groups:
      - {worker_type: prefill, num_gpus: 2}
      - {worker_type: decode, num_gpus: 4}
"""
FLAGS = SimpleNamespace(
    hf_checkpoint="/model",
    rollout_num_gpus=8,
    rollout_num_gpus_per_engine=2,
    prefill_num_servers=1,
    warnings=[],
    num_gpus_per_node=8,
)


def prefill_and_decode(prefill: int, decode: int) -> Any:
    def check(config: Any) -> None:
        (model,) = config.models
        assert [(g.worker_type, g.num_gpus) for g in model.server_groups] == [("prefill", prefill), ("decode", decode)]
        assert (config.has_pd_disaggregation, config.total_num_gpus) == (True, prefill + decode)

    return check


def resolved(model: Any) -> None:
    assert (model.model_path, model.update_weights) == ("/model", True)
    assert [group.num_gpus_per_engine for group in model.server_groups] == [2]
    assert model.has_encoder_disaggregation is False


def a_model() -> ModelConfig:
    return ModelConfig(name="actor", server_groups=[ServerGroupConfig(worker_type="regular", num_gpus=4)])


CONFIG_CALLS = [
    Call(CONFIG + "SglangConfig", lambda: {"models": [a_model()]}, lambda c: c.total_num_gpus == 4 or 1 / 0),
    Call(CONFIG + "SglangConfig.from_yaml", lambda: {"path": yaml_file(MODELS)}, prefill_and_decode(2, 4)),
    Call(CONFIG + "SglangConfig.from_prefill_num_servers", {"args": FLAGS}, prefill_and_decode(2, 6)),
    Call(CONFIG + "ModelConfig", {"name": "actor"}, lambda model: model.name == "actor" or pytest.fail(str(model))),
    Call(CONFIG + "ModelConfig.resolve", {"args": FLAGS}, lambda _, model: resolved(model), on=a_model),
    Call(
        CONFIG + "ServerGroupConfig",
        {"worker_type": "decode", "num_gpus": 4},
        lambda group: (group.worker_type, group.num_gpus) == ("decode", 4) or pytest.fail(str(group)),
    ),
]


def own_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--my-own", type=int, default=3)
    return parser


def adds(*, own: bool) -> Any:
    def check(provider: Any) -> None:
        parser = provider(argparse.ArgumentParser())
        assert parser.get_default("rollout_temperature") == 1.0
        assert parser.get_default("my_own") == (3 if own else None)

    return check


def inherits(args: Any, _: Any, given: dict[str, Any]) -> None:
    assert (args.lr, given["base_args"].lr) == (1e-6, 1e-6)


ARGUMENT_CALLS = [
    Call("slime.utils.arguments.get_slime_extra_args_provider", {}, adds(own=False)),
    Call("slime.utils.arguments.get_slime_extra_args_provider", {"add_custom_arguments": own_flags}, adds(own=True)),
    Call(
        "slime.utils.arguments.parse_megatron_role_args",
        {"base_args": argparse.Namespace(lr=1e-6), "path": None, "role": "actor"},
        inherits,
    ),
    *(
        Call(
            f"slime.backends.megatron_utils.{module}set_default_megatron_args",
            lambda: {"args": argparse.Namespace(hf_checkpoint="/model")},
            lambda args: (args.bf16, args.use_distributed_optimizer) == (True, True) or pytest.fail(str(args)),
        )
        for module in ("arguments.",)
    ),
]


def fresh_adam(lr: float, decay: float) -> Any:
    """With bias correction the first step of Adam is lr * sign(g), up to eps, after p *= 1 - lr * decay."""

    def check(optimizer: Any) -> None:
        parameter = optimizer.param_groups[0]["params"][0]
        parameter.grad = torch.tensor([4.0, -0.5])
        optimizer.step()
        check_equal(parameter, [1 * (1 - lr * decay) - lr, 2 * (1 - lr * decay) + lr])

    return check


def adam(**more: Any) -> dict[str, Any]:
    return {"params": [torch.nn.Parameter(torch.tensor([1.0, 2.0]))], **more}


ADAM = "slime.backends.megatron_utils.stateless_adam.StatelessAdam"
ADAM_CALLS = [
    Call(ADAM, adam, fresh_adam(1e-3, 0.0)),
    Call(
        ADAM,
        lambda: adam(lr=0.1, betas=(0.8, 0.9), eps=1e-8, weight_decay=0.5, amsgrad=False),
        fresh_adam(0.1, 0.5),
    ),
]


class Abacus(CpuAccelerator):
    """An accelerator of a plug-in."""

    device_type = "abacus"


def registered(_: Any, __: Any, given: dict[str, Any]) -> None:
    from slime.utils import accelerator

    try:
        assert given["name"] in accelerator._kinds
    finally:
        accelerator._kinds.pop(given["name"], None)
        accelerator.reset_accelerator()


DEVICE_CALLS = [
    Call(DEVICE + "device_type", {}, "cuda" if torch.cuda.is_available() else "cpu"),
    Call(DEVICE + "current_device", {}, lambda device: device is not None or pytest.fail("no device")),
    Call(DEVICE + "set_device", {"index": 0}, None),
    Call(DEVICE + "synchronize", {}, None),
    Call(DEVICE + "empty_cache", {}, None),
    Call(DEVICE + "register_accelerator", {"name": "abacus", "factory": Abacus}, registered),
    Call(
        DEVICE + "register_accelerator",
        {
            "name": "abacus",
            "factory": Abacus,
            "is_available": lambda: False,
            "priority": 3,
            "communication_backends": ("beads",),
        },
        registered,
    ),
    Call(DEVICE + "get_accelerator", {}, lambda found: found.device_type in ("cpu", "cuda") or pytest.fail(str(found))),
    Call(DEVICE + "reset_accelerator", {}, None),
    Call(DEVICE + "initialize_accelerator", {}, lambda found: found.device_type in ("cpu", "cuda") or 1 / 0),
]


def saved_text(path: Any) -> None:
    assert Path(path).read_text() == "a: 1\n"
    assert path.endswith(".yaml")
    Path(path).unlink()


def logs_to_wandb(words: Any) -> None:
    """Nothing without a key in the environment."""
    assert ("--use-wandb" in words) is bool(os.environ.get("WANDB_API_KEY"))


COMMAND_CALLS = [
    Call(COMMAND + "exec_command", {"cmd": "echo 2", "capture_output": True}, "2\n"),
    Call(
        COMMAND + "get_default_wandb_args", {"test_file": "x.py", "run_name_prefix": "ci", "run_id": "7"}, logs_to_wandb
    ),
    Call(COMMAND + "save_to_temp_file", {"text": "a: 1\n", "ext": "yaml"}, saved_text),
    Call(COMMAND + "get_bool_env_var", {"name": "SLIME_TEST_NO_SUCH_VARIABLE"}, False),
    Call(COMMAND + "get_bool_env_var", {"name": "SLIME_TEST_NO_SUCH_VARIABLE", "default": "true"}, True),
    Call(COMMAND + "create_run_id", {}, lambda name: len(name) == len("yymmdd-hhmmss-nnn") or pytest.fail(name)),
    Call(
        COMMAND + "ExecuteTrainConfig",
        {"cuda_core_dump": True, "num_nodes": 2, "extra_env_vars": "A=1"},
        lambda c: (c.cuda_core_dump, c.num_nodes, c.extra_env_vars) == (True, 2, "A=1") or pytest.fail(str(c)),
    ),
]
CALLS = [
    *TRACE_CALLS, *LOG_CALLS, *CONFIG_CALLS, *ARGUMENT_CALLS, *ADAM_CALLS, *DEVICE_CALLS, *COMMAND_CALLS,
]  # fmt: skip
