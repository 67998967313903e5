"""Public functions take a namespace that has what its maker wanted to set: declared defaults answer for the rest."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.utils.declared import with_defaults
from slime.utils.types import Sample
from tests.support.arguments import hand_made, run_args
from tests.support.public_surface import Name
from tests.support.reference_calls import Call, forms, perform
from tests.unit.compat.test_reference_calls import CALLS, ROWS, _nothing_stays, arguments_of  # noqa: F401


def with_own_arguments(call: Call) -> Call:
    def given() -> dict[str, Any]:
        arguments = call.arguments()
        if isinstance(arguments["args"], argparse.Namespace):
            arguments["args"] = hand_made(arguments["args"])
        return arguments

    return Call(call.path, given, call.expected, call.on, call.also)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("row", "call", "form"),
    [
        pytest.param(ROWS[call.path], with_own_arguments(call), form, id=f"{call.path}-{form}")
        for call in CALLS
        if "args" in arguments_of(call)
        for form in forms(ROWS[call.path])
    ],
)
def test_public_functions_need_only_what_differs_from_the_defaults(row: Name, call: Call, form: str) -> None:
    perform(row, call, form)


@pytest.mark.parametrize("make", [SimpleNamespace, argparse.Namespace])
def test_a_program_that_only_grades(make: Any) -> None:
    """``args`` of a stand-alone evaluation: what slime <= 0.3.1 reads of them for a built-in reward."""
    args = make(custom_rm_path=None, rm_type="math", reward_key=None)
    right, wrong = (Sample(response=text, label="5") for text in (r"\boxed{5}", r"\boxed{6}"))
    assert asyncio.run(async_rm(args, right)) == 1
    assert asyncio.run(batched_async_rm(args, [right, wrong])) == [1, 0]
    assert wrong.get_reward_value(make()) is None


def test_what_is_set_stays_and_the_object_is_the_same() -> None:
    args = SimpleNamespace(rollout_batch_size=3, rm_type="f1", eps_clip=0.5, rollout_stop=["x"], of_my_own=[1])
    given = dict(vars(args))
    assert with_defaults(args) is args
    assert {name: getattr(args, name) for name in given} == given
    assert (args.over_sampling_batch_size, args.eps_clip_high) == (3, 0.5)
    assert not hasattr(args, "hf_checkpoint"), "what has no default is still missed by its name"
    args.rm_type = "math"
    assert with_defaults(args).rm_type == "math"
    other = with_defaults(SimpleNamespace())
    assert other.eval_datasets is not args.eval_datasets, "no list is shared"


def test_defaults_are_those_of_a_parsed_command_line() -> None:
    parsed, own = run_args(), with_defaults(hand_made(run_args()))
    differ = {name for name, value in vars(parsed).items() if getattr(own, name, None) != value}
    assert differ - {"explicit_flags"} == set()


def test_objects_that_are_no_namespaces() -> None:
    @dataclasses.dataclass(frozen=True)
    class Frozen:
        rm_type: str = "f1"

    class Slots:
        __slots__ = ("rm_type",)

    slots = Slots()
    slots.rm_type = "f1"
    for given in (Frozen(), slots):
        found: Any = with_defaults(given)
        assert (found.rm_type, found.n_samples_per_prompt, found.reward_key) == ("f1", 1, None)
    mock, parsed = MagicMock(), run_args()
    for given in (mock, parsed, None):
        assert with_defaults(given) is given
