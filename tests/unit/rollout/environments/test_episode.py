"""Episodes against engines that answer from a script: tokens, masks, rewards, limits and failures."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from slime.arguments.files import environments as files
from slime.ray.manager.rollout_metrics import environment_metrics
from slime.rollout import sglang_rollout
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.environments import EnvironmentDataSource, episode
from slime.rollout.environments.episode import EnvironmentFailure, generate
from slime.rollout.outages import ServiceOutage
from slime.rollout.sglang_rollout import GenerateState, generate_rollout
from slime.utils.async_utils import run
from slime.utils.types import Sample, iter_samples
from tests.support import environments
from tests.support.agents import BEGIN, END
from tests.support.rollout_args import rollout_args
from tests.support.virtual_time import run_virtually

PATH = "slime.rollout.environments.generate"
HERE = "tests.support.environments."


def says(*lines: str, end: str = END) -> Any:
    """A model that says these lines, one a turn, by how many messages of its own the conversation has."""

    def reply(input_ids: list[int], params: dict[str, Any]) -> list[int]:
        turn = "".join(map(chr, input_ids)).count(f"{BEGIN}assistant\n") - 1
        return [ord(c) for c in lines[turn] + end]

    return reply


@pytest.fixture
def play(cluster, make_args, tmp_path):
    """Play one episode of the environment ``entry`` and return its sample."""

    def one(entry: dict[str, Any], reply: Any, *, evaluation: bool = False, sample: Any = None, **flags: Any) -> Sample:
        for engine in cluster.engines:
            engine.reply = reply
        path = tmp_path / "environments.yaml"
        path.write_text(yaml.safe_dump({"environments": [entry]}))
        flags = {"rollout_max_response_len": 400, "apply_chat_template": False, **flags}
        files.read.cache_clear()
        args = make_args(environment_config=str(path), custom_generate_function_path=PATH, **flags)
        given = sample or Sample(index=3, group_index=1, metadata={"seed": 5}, label="7")
        params = GenerateState(args).sampling_params
        return run(generate(args, given, dict(params), evaluation))

    return one


def of_response(sample: Sample) -> str:
    return "".join(map(chr, sample.tokens[len(sample.tokens) - sample.response_length :]))


def trained(sample: Sample) -> str:
    return "".join(c for c, mask in zip(of_response(sample), sample.loss_mask, strict=True) if mask)


def test_turns_are_the_engines_tokens_and_observations_are_not_trained(play, cluster):
    environments.CLOSED.clear()
    sample = play({"path": HERE + "Guess", "name": "g"}, says("2", "7", "5"))
    prompt = f"{BEGIN}user\nlevel 0{END}{BEGIN}assistant\n"
    higher, lower = (f"{BEGIN}user\n{word}{END}{BEGIN}assistant\n" for word in ("higher", "lower"))
    assert of_response(sample) == sample.response == f"2{END}{higher}7{END}{lower}5{END}"
    assert "".join(map(chr, sample.tokens)) == prompt + sample.response
    assert trained(sample) == f"2{END}7{END}5{END}"
    assert sample.status == Sample.Status.COMPLETED
    assert sample.reward == 1.0 - 2 * 0.125
    assert sorted((request["input_ids"] for request in cluster.requests), key=len) == [
        [ord(c) for c in prompt + text] for text in ("", f"2{END}{higher}", f"2{END}{higher}7{END}{lower}")
    ]
    assert environments.CLOSED == ["g"]
    found = environment_metrics([sample])
    assert found["environment/g/turns"] == 3
    assert found["environment/g/success"] == 0  # 0.75 is less than success_reward
    assert found["environment/g/rewritten_by_template"] == 0
    assert "environment/g/difficulty" not in found


def test_a_model_that_was_stopped_gets_its_message_closed(play):
    """A stop string leaves out the token that ends a message: it is appended, without loss."""
    sample = play({"path": HERE + "Guess"}, says("2", "5", end=""))
    assert sample.response == f"2{END}{BEGIN}user\nhigher{END}{BEGIN}assistant\n5"
    assert trained(sample) == "25"


def test_texts_stay_in_the_message_of_the_model(play):
    def reply(input_ids: list[int], params: dict[str, Any]) -> list[int]:
        return [ord(c) for c in ("end" if input_ids[-1] == ord("]") else "say")]

    prompt = [{"role": "user", "content": "shout"}]
    sample = play({"path": HERE + "Inline"}, reply, sample=Sample(index=0, prompt=prompt))
    assert sample.response == "say[SAY]end"
    assert sample.loss_mask == [1] * 3 + [0] * 5 + [1] * 3
    assert sample.prompt == prompt


def test_tool_calls_their_mistakes_and_the_answer(play, cluster):
    calls = call("add", a=3, b=4) + call("divide", a=1, b=0) + call("add", a="x") + call("nothing")
    given = Sample(prompt=[{"role": "user", "content": "3 + 4"}], label="7", index=0)
    sample = play({"path": HERE + "Calculator"}, says(calls, "7"), sample=given, rollout_max_response_len=900)
    replies = ["7", "error: b is 0", "error: a: Input should be a valid integer, unable to parse string as an integer",
               "error: there is no tool 'nothing'; the tools are: add, divide, broken"]  # fmt: skip
    results = "".join(f"{BEGIN}tool\n{text}{END}" for text in replies)
    assert sample.response == f"{calls}{END}{results}{BEGIN}assistant\n7{END}"
    assert trained(sample) == f"{calls}{END}7{END}"
    assert sample.reward == 1.0
    found = environment_metrics([sample])
    assert found["environment/Calculator/tool_calls"] == 4
    assert found["environment/Calculator/tool_error_rate"] == 0.75


def test_the_template_gets_the_tools(play, cluster):
    play({"path": HERE + "Calculator"}, says("7"), sample=Sample(prompt=[{"role": "user", "content": "?"}], index=0))
    (request,) = cluster.requests
    assert "".join(map(chr, request["input_ids"])).startswith(f"{BEGIN}tools add divide broken{END}{BEGIN}user\n?")


def call(name: str, **arguments: Any) -> str:
    return "<tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"


@pytest.mark.parametrize(
    ("entry", "said", "reason", "message"),
    [
        ({"path": HERE + "Guess"}, "x", "Guess.step.ValueError", "environment 'Guess', step after turn 1 raised Value"),
        ({"path": HERE + "Calculator"}, call("broken"), "Calculator.step.OSError", "disk on fire"),
        (
            {"path": HERE + "Slow", "step_timeout": 0.05, "options": {"hangs_in": "step"}}, "x",
            "Slow.step.TimeoutError", "environment 'Slow', step after turn 1 took more than 0.05 s (step_timeout)",
        ),
        (
            {"path": HERE + "Slow", "step_timeout": 0.05, "options": {"hangs_in": "reset"}}, "x",
            "Slow.reset.TimeoutError", "environment 'Slow', reset took more than 0.05 s (step_timeout)",
        ),
    ],
)  # fmt: skip
def test_a_failure_of_the_environment_aborts_the_sample(play, entry, said, reason, message):
    given = Sample(index=3, group_index=1, prompt="p", metadata={"seed": 5})
    sample = play(entry, says(*[said] * 4), sample=given)
    assert sample is given
    assert sample.status == Sample.Status.ABORTED
    assert sample.reward is None
    assert (sample.tokens, sample.response, sample.loss_mask) == ([], "", None)
    assert sample.metadata["abort_reason"] == reason
    assert message in sample.metadata["abort_error"]


def test_an_evaluation_tries_again_and_then_fails(play, cluster):
    with pytest.raises(EnvironmentFailure, match="environment 'Guess', step after turn 1 raised ValueError"):
        play({"path": HERE + "Guess"}, says("x"), evaluation=True)
    assert len(cluster.requests) == 3


@pytest.mark.parametrize(("limit", "turns"), [(13, 1), (14, 1), (27, 2)])
def test_an_observation_that_leaves_no_room_ends_the_episode(play, limit, turns):
    """A turn is 2 tokens, an observation 24: it is left out unless a token fits after it."""
    observation = len(f"{BEGIN}user\nhigher{END}{BEGIN}assistant\n")
    assert observation == 24
    sample = play({"path": HERE + "Guess"}, says("2", "3", "4"), rollout_max_response_len=limit)
    assert sample.status == Sample.Status.TRUNCATED
    assert sample.environment_episode["turns"] == turns
    assert sample.response_length <= limit


def test_out_of_turns_is_truncated(play):
    sample = play({"path": HERE + "Guess", "max_turns": 2}, says("2", "3", "5"))
    assert sample.status == Sample.Status.TRUNCATED
    assert trained(sample) == f"2{END}3{END}"
    assert sample.reward == -2 * 0.125 - 2.0


def test_a_rollout_replaces_groups_whose_environment_fails(cluster, make_args, tmp_path):
    """Two of eight prompts fail: their groups are given back, counted by reason, and none has a reward of 0."""
    for engine in cluster.engines:
        engine.reply = lambda ids, params: [ord(c) for c in (call("broken") if ids[0] == ord("1") else "no") + END]
    args = make_args(
        environment_path=[HERE + "Calculator"], custom_generate_function_path=PATH, rollout_batch_size=4,
        rollout_max_response_len=200, over_sampling_batch_size=4, apply_chat_template=False,
    )  # fmt: skip
    path = tmp_path / "p.jsonl"
    path.write_text("".join(f'{{"input": "{int(i in (1, 2))}{i}", "label": "x"}}\n' for i in range(8)))
    args.prompt_data = str(path)
    source = RolloutDataSourceWithBuffer(args)
    output = generate_rollout(args, 0, source)
    samples = list(iter_samples(output.samples))
    assert [s.prompt for s in samples[::2]] == ["00", "03", "04", "05"]
    assert all(s.reward == 0.0 and s.status == Sample.Status.COMPLETED for s in samples)
    assert output.metrics["rollout/aborted/Calculator.step.OSError"] == 4
    assert {"11", "12"} <= {group[0].prompt for group in source.buffer} <= {"11", "12", "06", "07"}
    failed = [group for group in source.buffer if group[0].prompt in ("11", "12")]
    assert all("abort_reason" not in s.metadata and s.reward is None for s in iter_samples(failed))


def test_groups_come_from_the_environments_alone(cluster, make_args):
    args = make_args(
        environment_path=[HERE + "Guess"], custom_generate_function_path=PATH, rollout_max_response_len=400,
        data_source_path="slime.rollout.environments.EnvironmentDataSource",
    )  # fmt: skip
    args.prompt_data = None
    for engine in cluster.engines:
        engine.reply = says(*"01234567")
    output = generate_rollout(args, 0, EnvironmentDataSource(args))
    for group in output.samples:
        assert len({s.response for s in group}) == 1  # a group has one task
        assert trained(group[0]) == "".join(f"{n}{END}" for n in range(group[0].metadata["seed"] % 8 + 1))
        assert group[0].prompt == [{"role": "user", "content": "level 0"}]
    assert len({s.metadata["seed"] for group in output.samples for s in group}) == len(output.samples)


def test_the_sample_must_name_one_of_several_environments(make_args):
    args = make_args(environment_path=[HERE + "Guess", HERE + "Inline"], custom_generate_function_path=PATH)
    with pytest.raises(ValueError, match=r'metadata\["environment"\] names none, expected one of Guess, Inline'):
        run(generate(args, Sample(index=0), {}))


async def test_an_episode_that_is_cancelled_is_closed_and_leaves_its_sample_alone(cluster, make_args, tmp_path):
    path = tmp_path / "slow.yaml"
    entry = {"path": HERE + "Slow", "options": {"hangs_in": "step"}}
    path.write_text(yaml.safe_dump({"environments": [entry]}))
    args = make_args(environment_config=str(path), custom_generate_function_path=PATH, rollout_max_response_len=400)
    environments.CLOSED.clear()
    sample = Sample(index=0, metadata={"seed": 1})
    before = dict(sample.__dict__)
    task = asyncio.ensure_future(generate(args, sample, dict(GenerateState(args).sampling_params)))
    while not cluster.requests:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)  # in the step
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert environments.CLOSED == ["Slow"]
    assert sample.__dict__ == before


def test_an_episode_of_a_rollout_that_ends_is_given_back(play, cluster, monkeypatch):
    """The engine was asked to stop: there is no more of this episode, and it is no failure."""

    async def aborts(args, sample, sampling_params, evaluation=False):
        sample.append_response_tokens(args, tokens=[65], log_probs=[-1.0], text="A")
        sample.status = Sample.Status.ABORTED
        return sample

    monkeypatch.setattr(sglang_rollout, "generate", aborts)
    sample = play({"path": HERE + "Guess"}, says("2"))
    assert sample.status == Sample.Status.ABORTED
    assert (sample.tokens, sample.response_length, sample.reward) == ([], 0, None)
    assert "abort_reason" not in sample.metadata


def test_an_evaluation_waits_longer_each_time_for_a_service_that_is_down(monkeypatch):
    began: list[float] = []

    async def fail(self: Any, sampling_params: Any) -> Any:
        began.append(asyncio.get_running_loop().time())
        raise episode.EnvironmentFailure("e.step", "down") from ConnectionRefusedError("no sandbox")

    monkeypatch.setattr(episode.Episode, "play", fail)
    monkeypatch.setattr(episode, "entry_of", lambda args, sample: SimpleNamespace(name="e"))
    args = rollout_args(service_outage_timeout=300.0)
    with pytest.raises(ServiceOutage, match="environment 'e' has failed for all for 300 s"):
        run_virtually(episode.generate(args, Sample(), {}, evaluation=True))
    gaps = [round(after - before) for before, after in pairwise(began[2:])]
    assert gaps[:7] == [1, 2, 4, 8, 16, 32, 60]
