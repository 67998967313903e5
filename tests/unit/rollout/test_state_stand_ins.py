"""Stand-ins for ``GenerateState`` in tests and plug-ins have three attributes, and nothing of slime's notes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from slime.rollout import sglang_rollout
from slime.rollout.requests import generate_state
from slime.rollout.sglang_rollout import generate_and_rm, generate_and_rm_group
from slime.utils.types import Sample
from tests.support.rollout_args import CharTokenizer, rollout_args

HERE = __name__


class StandIn:
    """The attributes of its state that ``generate_and_rm`` of slime <= 0.3.1 reads."""

    __slots__ = ("aborted", "events", "semaphore")  # nothing can be added to it

    def __init__(self, *, aborted: bool = False) -> None:
        self.semaphore = asyncio.Semaphore(1)
        self.aborted = aborted
        self.events: list[str] = []

    @contextlib.contextmanager
    def dp_rank_context(self) -> Iterator[int]:
        self.events.append("rank taken")
        yield 0
        self.events.append("rank given back")


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    generate_state._of_stand_ins.cache_clear()
    yield
    generate_state._of_stand_ins.cache_clear()


def stand(monkeypatch: pytest.MonkeyPatch, state: Any) -> Any:
    monkeypatch.setattr(sglang_rollout, "GenerateState", lambda args: state)
    return state


async def answer(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample.response, sample.status = f"answer {sample.index}", Sample.Status.COMPLETED
    return sample


async def length(args: Any, sample: Sample, **kwargs: Any) -> float:
    return float(len(sample.response))


async def fails(args: Any, sample: Sample, **kwargs: Any) -> float:
    raise KeyError("judge")


async def lengths(args: Any, samples: list[Sample], **kwargs: Any) -> list[float]:
    return [float(len(sample.response)) for sample in samples]


def own(**flags: Any) -> Any:
    return rollout_args(
        **{"custom_generate_function_path": f"{HERE}.answer", "custom_rm_path": f"{HERE}.length", **flags}
    )


@pytest.mark.parametrize("evaluation", [False, True])
async def test_a_sample_is_generated_and_scored(monkeypatch: pytest.MonkeyPatch, evaluation: bool) -> None:
    state = stand(monkeypatch, StandIn())
    sample = await generate_and_rm(own(), Sample(index=3), {}, evaluation=evaluation)
    assert (sample.response, sample.reward) == ("answer 3", 8.0)
    assert state.events == ["rank taken", "rank given back"]


async def test_a_mock_that_has_every_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    state = stand(monkeypatch, mock.MagicMock())
    state.semaphore, state.aborted = asyncio.Semaphore(1), False
    assert (await generate_and_rm(own(), Sample(index=12), {})).reward == 9.0


async def test_an_aborted_one_makes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    state = stand(monkeypatch, StandIn(aborted=True))
    sample = await generate_and_rm(own(), Sample(index=3), {})
    assert (sample.status, sample.reward, state.events) == (Sample.Status.ABORTED, None, [])


@pytest.mark.parametrize("group_rm", [False, True])
async def test_groups(monkeypatch: pytest.MonkeyPatch, group_rm: bool) -> None:
    stand(monkeypatch, StandIn())
    args = own(group_rm=group_rm, custom_rm_path=f"{HERE}.{'lengths' if group_rm else 'length'}")
    group = await generate_and_rm_group(args, [Sample(index=3), Sample(index=14)], {})
    assert [sample.reward for sample in group] == [8.0, 9.0]


async def test_a_failed_reward_costs_its_sample_as_in_a_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    stand(monkeypatch, StandIn())
    sample = await generate_and_rm(own(custom_rm_path=f"{HERE}.fails"), Sample(index=3), {})
    assert sample.remove_sample
    assert "judge" in sample.metadata["reward_error"]


async def test_the_default_generate_needs_a_tokenizer_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []

    async def post(url: str, payload: Any, **_: Any) -> Any:
        sent.append(payload)
        reported = [[-0.5, 65, None], [-0.5, 66, None]]
        return {"text": "AB", "meta_info": {"output_token_logprobs": reported, "finish_reason": {"type": "stop"}}}

    class WithTokenizer(StandIn):
        tokenizer, processor = CharTokenizer(), None

    monkeypatch.setattr(sglang_rollout, "post", post)
    stand(monkeypatch, WithTokenizer())
    args = own(custom_generate_function_path=None, sglang_router_ip="h", sglang_router_port=1)
    sample = await generate_and_rm(args, Sample(index=1, prompt="ab"), {"max_new_tokens": 4})
    assert (sample.response, sample.reward) == ("AB", 2.0)
    assert sent[0]["input_ids"][:2] == CharTokenizer().encode("ab", add_special_tokens=False)
