"""Rollout functions and what they are made of, called on stand-in engines by position and all by keyword."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from slime.rollout import fully_async_rollout, sglang_rollout
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.utils.async_utils import run
from slime.utils.types import Sample
from tests.support.arguments import hand_made
from tests.support.public_surface import read_table
from tests.support.reference_calls import Call, forms, perform
from tests.support.rollout_args import eval_config

ROWS = {row.path: row for row in read_table()}
ROLLOUT = "slime.rollout.sglang_rollout."
PARAMETERS = {"max_new_tokens": 5, "temperature": 1.0}
Make = Callable[[SimpleNamespace], Call]


def groups_of(output: Any, count: int) -> None:
    groups = output.samples if isinstance(output, RolloutFnTrainOutput) else output
    assert len(groups) == count
    assert all(sample.status is Sample.Status.COMPLETED for group in groups for sample in group)


def evaluated(output: Any) -> None:
    found = output.data if isinstance(output, RolloutFnEvalOutput) else output
    assert set(found) == {"held_out"}
    assert set(found["held_out"]) >= {"rewards", "truncated", "samples"}


def answered(sample: Sample) -> None:
    assert sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
    assert sample.tokens[: len("p0")] == [ord(c) for c in "p0"]
    assert len(sample.tokens) == len("p0") + sample.response_length > len("p0")
    assert len(sample.rollout_log_probs or []) == sample.response_length


def prompt() -> Sample:
    return Sample(index=0, group_index=0, prompt="p0", label="l0")


def with_eval(args: SimpleNamespace) -> SimpleNamespace:
    args.eval_datasets = [eval_config(args.prompt_data, "held_out")]
    return args


async def custom(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    sample.response, sample.status, sample.reward = str(evaluation), Sample.Status.COMPLETED, 0.0
    return sample


def rollout(name: str, also: dict[str, str] | None, **evaluation: bool) -> Make:
    judge = evaluated if evaluation.get("evaluation") else lambda output: groups_of(output, 4)
    return lambda args: Call(
        name,
        lambda: {
            "args": with_eval(args),
            "rollout_id": 0,
            "data_source": RolloutDataSourceWithBuffer(args),
            **evaluation,
        },
        judge,
        also=also,
    )


MAKERS: dict[str, list[Make]] = {
    ROLLOUT + "generate_rollout": [
        rollout(ROLLOUT + "generate_rollout", None, evaluation=False),
        rollout(ROLLOUT + "generate_rollout", {"data_source": "data_buffer"}, evaluation=True),
    ],
    "slime.rollout.fully_async_rollout.generate_rollout_fully_async": [
        rollout("slime.rollout.fully_async_rollout.generate_rollout_fully_async", None, evaluation=False),
        rollout(
            "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
            {"data_source": "data_buffer"},
            evaluation=False,
        ),
    ],
    ROLLOUT + "generate": [
        lambda args: Call(
            ROLLOUT + "generate", lambda: {"args": args, "sample": prompt(), "sampling_params": PARAMETERS}, answered
        )
    ],
    "slime.rollout.sglang_streaming_rollout.generate_streaming": [
        lambda args: Call(
            "slime.rollout.sglang_streaming_rollout.generate_streaming",
            lambda: {"args": args, "sample": prompt(), "sampling_params": PARAMETERS},
            answered,
        )
    ],
    ROLLOUT + "generate_and_rm": [
        lambda args: Call(
            ROLLOUT + "generate_and_rm",
            lambda: {
                "args": args,
                "sample": Sample(index=0, prompt="p0", generate_function_path=f"{__name__}.custom"),
                "sampling_params": PARAMETERS,
                "evaluation": True,
            },
            lambda sample: sample.response == "True" or pytest.fail(str(sample)),
        )
    ],
    ROLLOUT + "generate_and_rm_group": [
        lambda args: Call(
            ROLLOUT + "generate_and_rm_group",
            lambda: {
                "args": args,
                "group": [prompt(), prompt()],
                "sampling_params": PARAMETERS,
                "evaluation": False,
            },
            lambda group: [answered(sample) for sample in group] == [None, None] or pytest.fail(str(group)),
        )
    ],
    ROLLOUT + "generate_rollout_async": [
        lambda args: Call(
            ROLLOUT + "generate_rollout_async",
            lambda: {"args": args, "rollout_id": 0, "get_samples": RolloutDataSourceWithBuffer(args).get_samples},
            lambda result: groups_of(result[0], 4),
        )
    ],
    ROLLOUT + "eval_rollout": [
        lambda args: Call(
            ROLLOUT + "eval_rollout",
            lambda: {"args": with_eval(args), "rollout_id": 0},
            lambda result: evaluated(result[0]),
        )
    ],
    ROLLOUT + "eval_rollout_single_dataset": [
        lambda args: Call(
            ROLLOUT + "eval_rollout_single_dataset",
            lambda: {"args": args, "rollout_id": 0, "dataset_cfg": eval_config(args.prompt_data, "held_out")},
            evaluated,
        )
    ],
    ROLLOUT + "abort": [lambda args: Call(ROLLOUT + "abort", lambda: {"args": args, "rollout_id": 0}, [])],
    ROLLOUT + "GenerateState": [
        lambda args: Call(
            ROLLOUT + "GenerateState",
            lambda: {"args": args},
            lambda state: (state.args, state.aborted, state.remaining_batch_size) == (args, False, 0) or 1 / 0,
        )
    ],
    ROLLOUT + "GenerateState.reset": [
        lambda args: Call(
            ROLLOUT + "GenerateState.reset",
            {},
            lambda _, state: (state.aborted, state.remaining_batch_size) == (False, 0) or pytest.fail("not reset"),
            on=lambda: sglang_rollout.GenerateState(args),
        )
    ],
    ROLLOUT + "GenerateState.dp_rank_context": [
        lambda args: Call(
            ROLLOUT + "GenerateState.dp_rank_context",
            {},
            lambda block: block.__enter__() == 0 or pytest.fail("not the first rank"),
            on=lambda: sglang_rollout.GenerateState(args),
        )
    ],
    "slime.rollout.fully_async_rollout.AsyncRolloutWorker": [
        lambda args: Call(
            "slime.rollout.fully_async_rollout.AsyncRolloutWorker",
            lambda: {"args": args, "data_buffer": RolloutDataSourceWithBuffer(args)},
            lambda worker: worker.queue_size() == 0 or pytest.fail("not empty"),
        )
    ],
    **{
        f"slime.rollout.fully_async_rollout.AsyncRolloutWorker.{name}": [
            lambda args, name=name, given=given, expected=expected: Call(
                f"slime.rollout.fully_async_rollout.AsyncRolloutWorker.{name}",
                given,
                expected,
                on=lambda: fully_async_rollout.AsyncRolloutWorker(args, RolloutDataSourceWithBuffer(args)),
            )
        ]
        for name, given, expected in [
            ("get_completed_groups", {"limit": 2}, []),
            ("queue_size", {}, 0),
            ("stop", {}, None),
        ]
    },
    "slime.rollout.sample_hooks.apply_rollout_sample_hooks": [
        lambda args: Call(
            "slime.rollout.sample_hooks.apply_rollout_sample_hooks",
            lambda: {"args": hooked(args), "value": [[prompt()]], "evaluation": True},
            lambda value: value[0][0].metadata == {"evaluation": True} or pytest.fail(str(value)),
        )
    ],
    "slime.rollout.sample_hooks.set_current_rollout_id": [
        lambda args: Call("slime.rollout.sample_hooks.set_current_rollout_id", {"rollout_id": 3}, None)
    ],
    ROLLOUT + "get_model_url": [
        lambda args: Call(
            ROLLOUT + "get_model_url",
            lambda: {"args": args, "model_name": "other", "endpoint": "/abort"},
            f"http://{args.sglang_router_ip}:{args.sglang_router_port}/abort",
        )
    ],
    ROLLOUT + "load_function": [
        lambda args: Call(ROLLOUT + "load_function", {"path": "math.sqrt"}, lambda found: found(4) == 2 or 1 / 0)
    ],
}


def note(args: Any, sample: Sample, *, evaluation: bool = False) -> None:
    sample.metadata = {"evaluation": evaluation}


def hooked(args: SimpleNamespace) -> SimpleNamespace:
    args.rollout_sample_hook_path = [f"{__name__}.note"]
    return args


@pytest.mark.parametrize(
    ("path", "number", "form", "own_args"),
    [
        pytest.param(path, number, form, own_args, id=f"{path}-{form}-{number}{'-hand-made' if own_args else ''}")
        for path, makers in MAKERS.items()
        for number in range(len(makers))
        for form in forms(ROWS[path])
        for own_args in (False, True)
    ],
)
def test_calls_in_the_reference_form(
    path: str, number: int, form: str, own_args: bool, make_args: Any, monkeypatch: Any
) -> None:
    """With parsed arguments, and with a namespace that has what the caller wanted to set."""
    call = MAKERS[path][number](hand_made(make_args()) if own_args else make_args())
    row = ROWS[path]
    try:
        if row.kind == "coroutine":  # on the loop where the process's singletons live
            monkeypatch.setattr(asyncio, "run", run)
        perform(row, call, form)
    finally:
        fully_async_rollout.stop_global_worker()
