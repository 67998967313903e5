"""No flag is parsed and ignored: something outside of the parser reads each one, or the tables below say what does."""

from __future__ import annotations

import ast
import importlib.util
import re
from argparse import Namespace
from functools import cache
from pathlib import Path

import pytest

import slime
from slime.arguments.availability import is_available, refused_values
from slime.arguments.flag import Flag
from slime.arguments.passthrough import catalog
from slime.backends.sglang_utils.router import router_fields
from slime.backends.sglang_utils.server_args import EngineSpec, _owned_fields, forwarded_fields
from tests.support.arguments import run_args

SLIME = Path(slime.__file__).parent
ARGS_NAMES = {"args", "_args"}

# Attribute -> the module of slime/arguments that acts on it; nothing is left to do afterwards.
CONSUMED_WHILE_PARSING = {
    "custom_config_path": "parse.py",  # its keys are set on the namespace
    **dict.fromkeys(("ignore_unknown_flags", "config", "dump_config", "dry_run"), "parse.py"),
    "fp32": "device.py",  # decides bf16
    "grad_reduce_in_bf16": "device.py",  # decides accumulate_allreduce_grads_in_fp32
    "offload": "rules/placement.py",  # stands for two other flags
    "dump_details": "rules/debug.py",  # stands for two other flags (and the manager writes the tokenizer)
    "num_steps_per_rollout": "rules/parallelism.py",  # decides global_batch_size
    "log_probs_max_tokens_per_gpu": "rules/parallelism.py",  # warned about unless it equals --max-tokens-per-gpu
    "prefill_num_servers": "files/sglang_config.py",  # groups of engines
    "eval_prompt_data": "files/eval_config.py",
    "eval_config": "files/eval_config.py",
    **dict.fromkeys(
        ("eval_input_key", "eval_label_key", "eval_tool_key", "eval_temperature", "eval_top_p", "eval_top_k",
         "eval_max_response_len", "eval_min_new_tokens", "n_samples_per_eval_prompt"),
        "files/eval_config.py",  # values of the data sets
    ),
    **dict.fromkeys(("environment_path", "environment_config"), "files/environments.py"),  # environments_of
    "recompute_activations": "rules/megatron.py",  # decides recompute_granularity
    "use_gated_attention": "rules/megatron.py",  # decides attention_output_gate
    "num_layers_per_virtual_pipeline_stage": "rules/parallelism.py",  # these two: virtual_pipeline_model_parallel_size
    "num_virtual_stages_per_pipeline_rank": "rules/parallelism.py",
    "megatron_config_path": "rules/roles.py",  # values of single roles
    "critic_overrides": "rules/roles.py",  # values of the critic
    "custom_arguments_path": "parse.py",  # flags of a user's own
}  # fmt: skip

# Attributes read under a name that is put together, or passed on, at run time -> where.
READ_INDIRECTLY = {
    "rollout_max_context_len": "rollout/requests/generate_request.py",
    "eval_max_context_len": "rollout/requests/generate_request.py",
    "custom_generate_function_path": "rollout/sglang_rollout.py",
    **dict.fromkeys(
        ("squared_relu", "init_method_xavier_uniform", "bias_gelu_fusion", "bias_swiglu_fusion"),
        "backends/megatron_utils/model/provider.py",
    ),
    **dict.fromkeys(("post_self_attn_layernorm", "post_mlp_layernorm"), "backends/megatron_utils/model/layer_specs.py"),
}


@pytest.mark.parametrize("source", ["slime", "megatron"])
def test_every_flag_is_read(flags: list[Flag], source: str) -> None:
    """By slime, its plug-ins, or Megatron for what is named like a field of its configuration classes (all are copied).

    A newly declared flag that nothing reads fails here: build it, or put it into ``availability``.
    """
    fields = {record["name"] for record in catalog.records(catalog.MEGATRON)} & _words_of_megatron()
    read = _read_by_slime() | set(CONSUMED_WHILE_PARSING) | set(READ_INDIRECTLY) | fields
    candidates = [flag for flag in flags if flag.source == source and is_available(flag) and not _is_constant(flag)]
    assert [flag.option for flag in candidates if not {flag.dest, flag.field} & read] == []


def test_the_tables_are_true(flags: list[Flag]) -> None:
    known = {flag.dest for flag in flags}
    for name, module in CONSUMED_WHILE_PARSING.items():
        assert name in known
        text = (SLIME / "arguments" / module).read_text().replace("-", "_")
        assert re.search(rf"\b{name}\b|__{name}\b", text), f"{module} does not know {name}"
    for name, module in READ_INDIRECTLY.items():
        assert name in known
        assert f'"{name}"' in (SLIME / module).read_text() or f".{name}" in (SLIME / module).read_text(), name


def test_the_search_tells_reading_from_mentioning() -> None:
    tree = ast.parse(
        "x = args.one + self.args.two + getattr(args, 'three', None) + helper(self._args, 'four')\n"
        "args.five = 1\nother.six\ncall('seven')\n'eight'\n"
    )
    assert _names_read(tree) == {"one", "two", "three", "four"}


def test_every_sglang_flag_reaches_the_engines(flags: list[Flag]) -> None:
    """Every value that is set is on their command line, and slime sets none of the offered fields over it."""
    records = catalog.records(catalog.SGLANG)
    offered = {flag.field: flag for flag in flags if flag.source == "sglang" and is_available(flag)}
    args = Namespace(**{**vars(run_args()), **{flag.dest: object() for flag in offered.values()}})
    forwarded = forwarded_fields(args, records)
    assert [
        flag.option for field, flag in offered.items() if forwarded.get(field) is not getattr(args, flag.dest)
    ] == []
    spec = EngineSpec(rank=0, host="h", port=1, nccl_port=2, num_gpus=2, model_path="m")
    args = run_args()
    args.device_type = "cuda"
    plain = _owned_fields(args, spec)
    overwritten = {field for field in offered if field in plain}
    assert overwritten == {"tp_size", "pp_size", "enable_metrics"}  # a size is refused unless it is the derived one
    asked = run_args(sglang_pp_size=2, sglang_enable_metrics=True)
    asked.device_type = "cpu"
    assert _owned_fields(asked, spec)["pp_size"] == 2
    assert _owned_fields(asked, spec)["enable_metrics"]


@pytest.mark.parametrize("forced", ["disable_circuit_breaker", "disable_health_check"])
def test_every_router_flag_reaches_the_router(flags: list[Flag], forced: str) -> None:
    offered = [flag.dest for flag in flags if flag.source == "router"]
    args = Namespace(**{**vars(run_args()), **{name: object() for name in offered}})
    fields = router_fields(args, host="h", port=1)
    ignored = {name for name in offered if fields.get(name.removeprefix("router_")) is not getattr(args, name)}
    assert ignored == {"router_disable_circuit_breaker", "router_disable_health_check"}
    assert fields[forced] is True  # what the flag says is so, with or without it


def _is_constant(flag: Flag) -> bool:
    """A choice of which only one value is there now says nothing that could be ignored."""
    return flag.choices is not None and len(set(flag.choices) - set(refused_values(flag))) == 1


@cache
def _read_by_slime() -> set[str]:
    files = [p for p in SLIME.rglob("*.py") if SLIME / "arguments" not in p.parents]
    files += (SLIME.parent / "slime_plugins").rglob("*.py")
    return set().union(*(_names_read(ast.parse(path.read_text())) for path in files))


def _names_read(tree: ast.AST) -> set[str]:
    """``args.x``, ``self.args.x`` and any call that takes args and the string "x" (``getattr`` and its wrappers)."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _is_args(node.value):
            found.add(node.attr)
        if isinstance(node, ast.Call) and any(_is_args(argument) for argument in node.args):
            found.update(a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))
    return found


def _is_args(node: ast.AST) -> bool:
    return (isinstance(node, ast.Name) and node.id in ARGS_NAMES) or (
        isinstance(node, ast.Attribute) and node.attr in ARGS_NAMES
    )


@cache
def _words_of_megatron() -> set[str]:
    """Every name that follows a dot or stands in quotes in megatron-core's sources."""
    spec = importlib.util.find_spec("megatron.core")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("megatron-core is not installed")
    (root,) = spec.submodule_search_locations
    reads = re.compile(r"""(?:\.|["'])(\w+)""")
    return set().union(*(reads.findall(path.read_text()) for path in Path(root).rglob("*.py")))
