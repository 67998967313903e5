"""The teacher's log-probs: what is asked, what is read of the reply, and what cannot be right."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.train.loss import compute_advantages_and_returns
from slime.batching.train_data import build_train_data
from slime.rollout import on_policy_distillation
from slime.rollout.on_policy_distillation import post_process_rewards, reward_func, teacher_log_probs
from slime.rollout.rm_hub import batched_async_rm, remote
from slime.rollout.rm_hub.errors import RewardErrors
from slime.servers.http_client import HttpRequestError, HttpTimeoutError
from slime.utils.types import Sample
from tests.support.arguments import run_args
from tests.support.standin import Failure, StandInCluster

PATH = "slime.rollout.on_policy_distillation.reward_func"


def args(**changes: Any) -> Namespace:
    return run_args(**{"rollout_temperature": 0.7, "custom_rm_path": PATH, **changes})


def sample(tokens: str = "pqrst", response: int = 3, **fields: Any) -> Sample:
    ids = [ord(c) for c in tokens]
    fields = {"index": 4, "group_index": 2, "loss_mask": [1] * response, "status": Sample.Status.COMPLETED, **fields}
    return Sample(tokens=ids, response_length=response, **fields)


def reply(tokens: str = "pqrst", first: Any = None) -> dict[str, Any]:
    """As an SGLang server tells it: the first token has no log-prob, the others -1, -2, ... in order."""
    entries = [[first if i == 0 else -float(i), ord(c), None] for i, c in enumerate(tokens)]
    return {
        "text": "",
        "meta_info": {"input_token_logprobs": entries, "finish_reason": {"type": "length", "length": 0}},
    }


@pytest.fixture
def teacher(monkeypatch):
    monkeypatch.setattr(remote, "_client", None)
    monkeypatch.setattr(remote, "PAUSE_S", 0.0)
    with StandInCluster(1) as cluster:
        yield cluster.engines[0]


def answers(*replies: Any) -> list[Failure]:
    return [Failure(200, json.dumps(value).encode()) for value in replies]


async def test_the_whole_reply_is_the_reward(teacher):
    teacher.failures.extend(answers(reply()))
    asked = args(rm_url=f"{teacher.url}/generate")
    assert await reward_func(asked, sample()) == reply()
    (request,) = teacher.requests
    assert {name: value for name, value in request.items() if name != "rid"} == {
        "input_ids": [ord(c) for c in "pqrst"],
        "sampling_params": {"temperature": 0.7, "max_new_tokens": 0, "skip_special_tokens": False},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    await remote.get_client().close()


async def test_a_list_of_samples_gets_a_list_of_replies(teacher):
    teacher.reply = lambda ids, params: []
    teacher.failures.extend([Failure(503, b"busy"), *answers(reply("pqr"), reply("pqr"))])
    asked = args(rm_url=f"{teacher.url}/generate")
    assert await batched_async_rm(asked, [sample("pqr", 1), sample("pqr", 1)]) == [reply("pqr")] * 2
    assert len(teacher.requests) == 3
    await remote.get_client().close()


async def test_a_teacher_that_refuses_costs_the_sample(teacher):
    teacher.failures.append(Failure(400, b"longer than the context length"))
    asked, unlucky = args(rm_url=f"{teacher.url}/generate"), sample()
    with pytest.raises(HttpRequestError, match="longer than the context"):
        await reward_func(asked, unlucky)
    teacher.failures.append(Failure(400, b"longer than the context length"))
    await RewardErrors().score_one(asked, unlucky, reward_func)
    assert unlucky.remove_sample
    assert post_process_rewards(asked, [unlucky]) == ([0.0], [0.0])
    assert unlucky.teacher_log_probs == [0.0] * 3
    await remote.get_client().close()


async def test_a_teacher_that_hangs_once_is_asked_again_in_time(teacher, monkeypatch):
    """The reward's own deadline would otherwise end with that of the first attempt."""
    asked, deadlines = args(rm_url=f"{teacher.url}/generate", rollout_request_timeout=90.0), []

    async def post(url: str, payload: Any, *, max_retries: int, timeout: float) -> Any:
        deadlines.append(timeout)
        if len(deadlines) == 1:
            raise HttpTimeoutError("POST", url, "hangs", status=None, body="", attempts=1, elapsed=timeout)
        return reply()

    monkeypatch.setattr(remote.get_client(), "post", post)
    errors, one = RewardErrors(), sample()
    await errors.score_one(asked, one, reward_func)
    assert (one.reward, errors.failed) == (reply(), [])
    assert deadlines == [30.0, 30.0]


def told_as(ids: list[int]) -> dict[str, Any]:
    return {"meta_info": {"input_token_logprobs": [[-float(i) if i else None, token] for i, token in enumerate(ids)]}}


@pytest.fixture
def no_last_id(monkeypatch):
    monkeypatch.setattr(on_policy_distillation, "_last_ids", {})


async def test_the_last_id_of_the_vocabulary_is_returned_as_zero(teacher, no_last_id):
    """As SGLang tells it, in the prompt too; that it is in the vocabulary is asked once."""
    asked, known = args(rm_url=f"{teacher.url}/generate"), told_as([0])
    teacher.failures.extend(answers(told_as([0, 7, 0, 0, 8]), known, told_as([7, 0])))
    one = Sample(tokens=[383, 7, 0, 383, 8], response_length=3, index=1)
    reply = await reward_func(asked, one)
    assert teacher_log_probs(one, reply) == [-2.0, -3.0, -4.0]
    question = teacher.requests[1]
    assert question["token_ids_logprob"] == [383]
    assert question["input_ids"] == [0]
    other = Sample(tokens=[7, 383], response_length=1, index=2)
    assert teacher_log_probs(other, await reward_func(asked, other)) == [-1.0]
    assert len(teacher.requests) == 3
    await remote.get_client().close()


async def test_an_id_that_the_teacher_does_not_have(teacher, no_last_id):
    asked, refusal = args(rm_url=f"{teacher.url}/generate"), Failure(400, b"valid range is [0, 384)")
    teacher.failures.extend([*answers(told_as([7, 0])), refusal])
    with pytest.raises(HttpRequestError, match="valid range is"):
        await reward_func(asked, Sample(tokens=[7, 384], response_length=1, index=1))
    await remote.get_client().close()


async def test_only_one_id_is_the_last(teacher, no_last_id):
    asked = args(rm_url=f"{teacher.url}/generate")
    teacher.failures.extend(answers(told_as([7, 0, 0]), told_as([0])))
    with pytest.raises(ValueError, match="response token 0 is 382, but the teacher returned 0"):
        await reward_func(asked, Sample(tokens=[7, 382, 383], response_length=2, index=1))
    await remote.get_client().close()


async def test_no_teacher_is_named():
    with pytest.raises(ValueError, match="needs --rm-url"):
        await reward_func(args(), sample())


@pytest.mark.parametrize(
    ("response", "expected"), [(3, [-2.0, -3.0, -4.0]), (1, [-4.0]), (4, [-1.0, -2, -3, -4]), (0, [])]
)
def test_the_tail_of_the_response_length_is_kept(response, expected):
    one = sample(response=response, reward=reply())
    other = sample(response=response, reward=reply(first=-0.1))
    assert post_process_rewards(args(), [one, other]) == ([0.0, 0.0], [0.0, 0.0])
    assert one.teacher_log_probs == other.teacher_log_probs == expected


def test_replies_of_the_log_prob_server_are_about_all_tokens_but_the_first():
    one = sample(reward={"request_id": "x", "log_probs": [-1.0, -2.0, -3.0, -4.0]})
    post_process_rewards(args(), [one])
    assert one.teacher_log_probs == [-2.0, -3.0, -4.0]


def test_replies_under_a_reward_key():
    one = sample(reward={"teacher": reply(), "score": 1})
    post_process_rewards(args(reward_key="teacher"), [one])
    assert one.teacher_log_probs == [-2.0, -3.0, -4.0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0.5, "has neither meta_info.input_token_logprobs nor log_probs"),
        (None, "has neither meta_info.input_token_logprobs nor log_probs"),
        ({"text": ""}, "has neither meta_info.input_token_logprobs nor log_probs"),
        ({"meta_info": {"output_token_logprobs": []}}, "has neither meta_info.input_token_logprobs nor log_probs"),
        (reply("pqrs"), "log-probs of 4 tokens, the sample has 5 .3 of them in the response"),
        ({"log_probs": [-1.0, -2.0, -3.0]}, "log-probs of 4 tokens, the sample has 5"),
        ({"log_probs": [-1.0, -2.0, -3.0, -4.0, -5.0]}, "log-probs of 6 tokens, the sample has 5"),
        ({"log_probs": [-1.0, -2.0, None, -4.0]}, "response token 1 is None"),
        (reply("pqrsx"), "response token 2 is 116, but the teacher returned 120; .* same tokenizer"),
        ({"meta_info": {"input_token_logprobs": [[None, ord(c)] for c in "pqrst"]}}, "response token 0 is None"),
        ({"meta_info": {"input_token_logprobs": [[float("nan"), ord(c)] for c in "pqrst"]}}, "response token 0 is nan"),
    ],
)
def test_what_cannot_be_right_names_the_sample(value, message):
    with pytest.raises(ValueError, match=f"sample index=4 group_index=2.*{message}"):
        post_process_rewards(args(), [sample(reward=value)])


def test_a_response_without_a_prompt_has_no_first_log_prob():
    with pytest.raises(ValueError, match="has no prompt"):
        teacher_log_probs(sample("qrs", 3), reply("qrs"))


def test_images_may_be_any_number_of_tokens_in_the_prompt():
    with_image = sample(multimodal_inputs={"images": ["x"]})
    assert teacher_log_probs(with_image, reply("pIIIqrst")) == [-5.0, -6.0, -7.0]


def test_they_reach_the_advantages(monkeypatch):
    """A custom advantage function, as the documentation shows it, trains towards the teacher."""
    samples = [sample(reward=reply()), sample("pqrs", 1, reward=reply("pqrs"))]
    raw, rewards = post_process_rewards(args(), samples)
    data = build_train_data(args(), samples, raw, rewards)
    assert data["teacher_log_probs"] == [[-2.0, -3.0, -4.0], [-3.0]]
    rollout_data = {
        "teacher_log_probs": [torch.tensor(values) for values in data["teacher_log_probs"]],
        "log_probs": [torch.tensor([-1.0, -3.5, -2.0]), torch.tensor([-3.0])],
        "rewards": rewards,
        "response_lengths": data["response_lengths"],
        "total_lengths": [5, 4],
        "loss_masks": [torch.tensor(mask) for mask in data["loss_masks"]],
    }
    own = f"{__name__}.towards_the_teacher"
    options = {"custom_advantage_function_path": own, "kl_coef": 0.0, "normalize_advantages": False}
    compute_advantages_and_returns(args(**options), rollout_data)
    assert [values.tolist() for values in rollout_data["advantages"]] == [[-1.0, 0.5, -2.0], [0.0]]


def towards_the_teacher(args: Any, rollout_data: dict[str, Any]) -> None:
    pairs = zip(rollout_data["teacher_log_probs"], rollout_data["log_probs"], strict=True)
    rollout_data["advantages"] = [teacher - student for teacher, student in pairs]
    rollout_data["returns"] = rollout_data["advantages"]
