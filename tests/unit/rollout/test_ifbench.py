"""The ifbench reward with checkers that have the published form, in this process and in a reward worker."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any

import pytest

from slime.arguments.errors import ArgumentError
from slime.rollout.rm_hub import async_rm, ifbench
from slime.rollout.rm_hub.errors import RewardErrors
from slime.rollout.rm_hub.failure import RewardFailure
from slime.rollout.rm_hub.ifbench import compute_ifbench_reward
from slime.rollout.rm_hub.workers import close_reward_workers
from slime.utils.types import Sample
from tests.support.arguments import dry, parse, run_args

CHECKERS = '''
"""Two instructions, in the form of the published module."""
import dataclasses, time

IMPORTED_WITHIN = sum(i * i for i in range({work}))

@dataclasses.dataclass
class InputExample:
    key: int
    instruction_id_list: list
    prompt: str
    kwargs: list

@dataclasses.dataclass
class OutputExample:
    follow_all_instructions: bool
    follow_instruction_list: list

def words(response, N=None, small=None):
    return len(response.split()) == N

def repeats(response, prompt_to_repeat=None):
    return response.startswith(prompt_to_repeat)

INSTRUCTIONS = {{"count:words": words, "repeat:prompt": repeats}}

def test_instruction_following_strict(inp, {second}):
    response = {response}
    assert isinstance(inp.key, int) and isinstance(inp.prompt, str)
    followed = [
        bool(response.strip()) and INSTRUCTIONS[name](response, **arguments)
        for name, arguments in zip(inp.instruction_id_list, inp.kwargs, strict=True)
    ]
    return OutputExample(all(followed), followed)
'''
PUBLISHED = {"second": "prompt_to_response", "response": "prompt_to_response[inp.prompt]"}
WORDS = {
    "instruction_id_list": ["count:words"],
    "kwargs": [{"N": 3, "small": None}],
    "prompt_text": "q",
    "record_id": 7,
}


@pytest.fixture
def checkers(tmp_path, monkeypatch):
    """Writes the module into a directory on the path; its name is free again afterwards."""

    def write(work: int = 0, **form: str) -> None:
        text = CHECKERS.format(work=work, **(form or PUBLISHED))
        (tmp_path / "evaluation_lib.py").write_text(text)
        sys.modules.pop("evaluation_lib", None)
        ifbench.load_checkers.cache_clear()

    monkeypatch.syspath_prepend(str(tmp_path))
    yield write
    sys.modules.pop("evaluation_lib", None)
    ifbench.load_checkers.cache_clear()
    close_reward_workers()


@pytest.mark.parametrize("form", [PUBLISHED, {"second": "response: str", "response": "response"}])
def test_every_instruction_has_to_be_followed(checkers, form):
    checkers(**form)
    both = {
        "instruction_id_list": ["count:words", "repeat:prompt"],
        "kwargs": [{"N": 4}, {"prompt_to_repeat": "say it"}],
        "prompt_text": "say it in four words",
        "record_id": 1,
    }
    assert compute_ifbench_reward("one two three", None, WORDS) == 1.0
    assert compute_ifbench_reward("one two", None, WORDS) == 0.0
    assert compute_ifbench_reward("say it once more", "ignored", both) == 1.0
    assert compute_ifbench_reward("say it once", None, both) == 0.0
    assert compute_ifbench_reward("four words are here", None, both) == 0.0
    for nothing in ("", "  \n", None):
        assert compute_ifbench_reward(nothing, None, both) == 0.0
    assert both["kwargs"] == [{"N": 4}, {"prompt_to_repeat": "say it"}]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"instruction_id_list": None}, "instruction_id_list, a list of instructions, got None"),
        ({"instruction_id_list": []}, "instruction_id_list"),
        ({"instruction_id_list": "count:words"}, "instruction_id_list"),
        ({"prompt_text": None}, "prompt_text, the prompt as one string"),
        ({"kwargs": [{}, {}]}, "kwargs, a list of 1 dicts, one per instruction"),
        ({"kwargs": ["N=3"]}, "'N=3' in it"),
        ({"instruction_id_list": ["count:letters"]}, r"evaluation_lib.py\) knows no instruction 'count:letters'"),
    ],
)
def test_metadata_that_cannot_be_checked_is_an_error(checkers, changes, message):
    checkers()
    with pytest.raises(ValueError, match=message):
        compute_ifbench_reward("one two three", None, {**WORDS, **changes})


def args(**changes: Any) -> Namespace:
    return run_args(**{"rm_type": "ifbench", **changes})


async def test_it_is_graded_in_a_worker_that_is_not_charged_for_the_import(checkers):
    checkers(work=10_000_000)  # more CPU time than the limit
    asked = args(reward_time_limit=0.3, reward_workers=1)
    sample = Sample(index=0, prompt="q", response="one two three", metadata={**WORDS, "unrelated": object()})
    assert await async_rm(asked, sample) == 1.0
    sample.response = r"so \boxed{one two three}"
    assert await async_rm(asked, sample) == 0.0
    sample.metadata = {**WORDS, "rm_type": "boxed_ifbench"}
    assert await async_rm(args(rm_type=None, reward_time_limit=0.3, reward_workers=1), sample) == 1.0


async def test_without_the_checkers_samples_say_so():
    asked = args(reward_workers=1, reward_failure_tolerance=1.0)
    sample = Sample(index=0, prompt="q", response="one two three", metadata=dict(WORDS))
    with pytest.raises(RewardFailure, match=r"needs the checkers of https://github.com/allenai/IFBench"):
        await async_rm(asked, sample)
    errors = RewardErrors()
    await errors.score_one(asked, sample, async_rm)
    assert (sample.reward, sample.remove_sample) == (0.0, True)
    close_reward_workers()


def test_another_module_of_that_name_is_noticed(tmp_path, checkers):
    checkers()
    (tmp_path / "evaluation_lib.py").write_text("InputExample = dict\n")
    with pytest.raises(ImportError, match="is not that of IFBench: it has no test_instruction_following_strict"):
        compute_ifbench_reward("one two three", None, WORDS)


def test_a_run_is_refused_before_anything_starts(checkers):
    with pytest.raises(ArgumentError, match="--rm-type ifbench: there is no module evaluation_lib"):
        parse("--rm-type", "ifbench")
    assert any("evaluation_lib" in message for message in dry("--rm-type", "ifbench").unchecked)
    checkers()
    assert parse("--rm-type", "ifbench").rm_type == "ifbench"
