"""``Args`` has what a run's arguments have: names, types, and every attribute that slime reads."""

from __future__ import annotations

import ast
import types
import typing
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.arguments.args import Args
from slime.arguments.args.megatron import MegatronArgs
from slime.arguments.args.own import OwnArgs
from slime.arguments.args.router import RouterArgs
from slime.arguments.args.sglang import SGLangArgs
from slime.arguments.derived import RESOLVED, DerivedArgs
from slime.arguments.files.eval_config import EvalDatasetConfig
from tests.support.arguments import run_args
from tools import gen_args

ROOT = Path(__file__).parents[3]
PARTS = (OwnArgs, MegatronArgs, SGLangArgs, RouterArgs, DerivedArgs)
LATER = {
    "device_type", "bias_activation_fusion",  # finalize_for_device
    "run_id", "generates_while_training",  # the driver
    "sglang_model_routers", "sglang_model_engines",  # the rollout manager
    "unchecked", "not_available", "warnings", "needed",  # while the arguments are resolved
    "disable_grad_buffers_cpu_backup", "disable_param_buffers_cpu_backup",  # a trainer that is offloaded
}  # fmt: skip
AT_START = {"run_dir", "sglang_router_ip", "sglang_router_port"}
"""Flags whose None something replaces after parsing."""
WHERE_READ = {"pg_loss_length", "update_weight_disk_dir"}
"""Flags whose None a rule refuses in the runs that read them."""
SERVER_ARGS = "slime/backends/sglang_utils/engine_plugin"
"""Places where ``args`` are those of SGLang's server."""


def annotations() -> dict[str, Any]:
    """Attribute -> its type."""
    return {
        name: annotation
        for part in PARTS
        for name, annotation in typing.get_type_hints(part, localns={"EvalDatasetConfig": EvalDatasetConfig}).items()
    }


def fits(value: Any, annotation: Any) -> bool:
    """Return True if ``value`` is an instance of ``annotation``; an int is a float."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return True
    if annotation is None or annotation is type(None):
        return value is None
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, member) for member in inner)
    if origin is typing.Literal:
        return value in inner
    if origin is dict:
        return isinstance(value, dict) and all(fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items())
    if origin in (list, frozenset):
        return isinstance(value, origin) and all(fits(item, inner[0]) for item in value)
    if annotation is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, annotation)


def wrong_types(args: Namespace) -> list[str]:
    """The attributes of ``args`` that are not of their types."""
    declared = annotations()
    return [
        f"{name}: {declared[name]} = {value!r}"
        for name, value in vars(args).items()
        if not fits(value, declared[name]) and not (value is None and name in AT_START | WHERE_READ)
    ]


def test_names_are_those_of_a_parsed_run() -> None:
    parsed = set(vars(run_args()))
    assert parsed - annotations().keys() == set()
    assert annotations().keys() - parsed == LATER | {"offload"}  # the shorthand goes away


def test_no_attribute_is_declared_twice() -> None:
    names = [name for part in PARTS for name in part.__annotations__]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--advantage-estimator", "ppo", "--offload-train"),
        ("--eval-interval", "1", "--eval-prompt-data", "aime", "/data/aime.jsonl", "--eval-max-response-len", "8"),
        ("--train-env-vars", '{"A": "1"}', "--rollout-stop", "a", "b", "--profile-target", "train_actor"),
    ],
    ids=["defaults", "critic", "evaluation", "lists"],
)
def test_values_have_the_declared_types(flags: tuple[str, ...], tmp_path: Path) -> None:
    data = tmp_path / "aime.jsonl"
    data.write_text('{"input": "1 + 1 ="}\n')
    assert wrong_types(run_args(*(str(data) if flag == "/data/aime.jsonl" else flag for flag in flags))) == []


def test_a_value_of_another_type_is_found() -> None:
    assert len(wrong_types(run_args(lr="fast", rollout_batch_size=None))) == 2


def test_a_namespace_stays_one() -> None:
    assert Args is Namespace
    assert type(run_args()) is Namespace


def test_resolved_flags_are_flags() -> None:
    flags = set().union(*(part.__annotations__ for part in PARTS if part is not DerivedArgs))
    assert flags >= RESOLVED
    assert RESOLVED >= AT_START | WHERE_READ


def reads(source: str) -> set[str]:
    """The attributes that ``source`` reads or sets of something called ``args``."""
    return {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and _name(node.value) in ("args", "_args")
    }


def _name(node: ast.expr) -> str | None:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None


def test_every_read_attribute_is_declared() -> None:
    declared = set(annotations())
    found = {
        path.relative_to(ROOT).as_posix(): sorted(unknown)
        for path in sorted((ROOT / "slime").rglob("*.py"))
        if not path.is_relative_to(ROOT / SERVER_ARGS)
        and (unknown := reads(path.read_text(encoding="utf-8")) - declared)
    }
    assert found == {}


def test_what_counts_as_a_read() -> None:
    assert reads("args.lr + self.args.seed; self._args.save = 1; config.lr2") == {"lr", "seed", "save"}


def test_annotations_of_flags() -> None:
    declared = {name: text for part in PARTS for name, text in part.__annotations__.items()}
    assert declared["lr"] == "float"
    assert declared["rollout_stop"] == "list[str] | None"
    assert declared["over_sampling_batch_size"] == "int"  # None is --rollout-batch-size
    assert declared["update_weight_transport"] == "Literal['nccl', 'disk', 'p2p']"
    assert declared["moe_router_load_balancing_type"] == "str | list[str]"
    assert declared["sglang_mem_fraction_static"] == "float | None"
    assert declared["layernorm_epsilon"] == declared["norm_epsilon"] == "float"


def test_modules_match_the_declarations() -> None:
    assert gen_args.differences() == []


def test_a_module_that_is_out_of_date_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in gen_args.render().items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(gen_args, "FOLDER", tmp_path)
    (tmp_path / "own.py").write_text((tmp_path / "own.py").read_text().replace("colocate: bool", "colocate: int"))
    assert [line.split()[0] for line in gen_args.differences()] == ["slime/arguments/args/own.py"]
