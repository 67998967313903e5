"""The routed experts that samples of a session have for routing replay."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from slime.agent.adapters import OpenAIAdapter, common
from slime.agent.trajectory import Placeholders, TrajectoryManager, TurnRecord
from slime.agent.turn_experts import TurnExperts
from slime.utils.types import Sample
from tests.support.agents import ToolTokenizer
from tests.support.arguments import run_args

LAYERS, TOPK = 2, 2
ARGS = run_args(use_rollout_routing_replay=True, num_layers=LAYERS, moe_router_topk=TOPK, num_experts=300)
IMAGE = 9


def rows(count: int, number: int) -> np.ndarray:
    return np.full((count, LAYERS, TOPK), number, dtype=np.int32)


def numbers(sample: Sample) -> list[int]:
    assert sample.rollout_routed_experts.shape == (len(sample.tokens) - 1, LAYERS, TOPK)
    return sample.rollout_routed_experts[:, 0, 0].tolist()


class Engine:
    """Answers with ``outputs`` in turn; the experts of its n-th answer are all n. It aborts the first."""

    def __init__(self, *outputs: list[int], lost: int = 0) -> None:
        self.outputs, self.lost, self.bodies = list(outputs), lost, list[dict[str, Any]]()

    async def __call__(self, url: str, body: dict[str, Any], headers: Any = None) -> dict[str, Any]:
        self.bodies.append({**body, "input_ids": list(body["input_ids"])})
        output = self.outputs[len(self.bodies) - 1]
        read = rows(len(body["input_ids"]) + len(output) - 1 - self.lost, 255 + len(self.bodies))
        finish = "abort" if len(self.bodies) == 1 else "stop"
        return {"text": "", "meta_info": {
            "output_token_logprobs": [[-1.0, token, None] for token in output], "finish_reason": {"type": finish},
            "completion_tokens": len(output), "routed_experts": read.reshape(-1).tolist(),
        }}  # fmt: skip


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(common, "RESUME_PAUSE_S", 0.0)

    def ask(engine: Engine, *prompts: list[int], args: Any = ARGS) -> list[TurnRecord]:
        monkeypatch.setattr(common, "post", engine)
        adapter = OpenAIAdapter(tokenizer=ToolTokenizer(), sglang_url="http://engine", args=args)

        async def all_of_them() -> list[TurnRecord]:
            session = common.Session()
            return [await common.call_sglang_generate(prompt, session, {}, adapter=adapter) for prompt in prompts]

        return asyncio.run(all_of_them())

    return ask


def test_a_sample_has_the_experts_that_its_tokens_were_sampled_with(turns: Any) -> None:
    """Those of a token are of the request that read it first: the resumed one and the next turn read it again."""
    engine = Engine([10, 11], [12], [20, 21])
    first, second = turns(engine, [1, 2, 3], [1, 2, 3, 10, 11, 12, 4])
    assert all(body["return_routed_experts"] for body in engine.bodies)
    assert engine.bodies[0]["custom_labels"] == {"slime_return_routed_experts": "true"}
    manager, asked = TrajectoryManager(), [{"role": "user", "content": "q"}]
    said = {"role": "assistant", "content": "a"}
    manager.record_turn("s", turn=first, prompt_messages=asked, response_message=said)
    more = [*asked, said, {"role": "user", "content": "more"}]
    manager.record_turn("s", turn=second, prompt_messages=more, response_message=said)
    [sample] = manager.get_trajectory("s", base_sample=Sample(index=0))
    assert sample.tokens == [1, 2, 3, 10, 11, 12, 4, 20, 21]
    # the last token of an answer is not read for it: 11 by the resumed request, and 12 by the second turn
    assert numbers(sample) == [256, 256, 256, 256, 257, 258, 258, 258]


def test_a_reply_without_experts_is_an_error(turns: Any) -> None:
    with pytest.raises(RuntimeError, match=r"has 12 routed experts, .* needs 4 tokens x 2 layers x top-2: is it of"):
        turns(Engine([10, 11], lost=1), [1, 2, 3])


def test_without_replay_none_are_asked_for(turns: Any) -> None:
    for args in (None, run_args()):
        engine = Engine([10, 11], [12])
        [turn] = turns(engine, [1, 2, 3], args=args)
        assert turn.experts is None
        assert "return_routed_experts" not in engine.bodies[0]


def test_images_count_as_the_tokens_that_the_engine_makes_of_them() -> None:
    """The second turn shows another image after what both read, the third departs before the first image."""
    lengths, manager = {"a": 3, "b": 2}, TrajectoryManager(fork_threshold_tokens=0)
    said = {"role": "assistant", "content": "x"}
    prompts = [[1, IMAGE], [1, IMAGE, 10, 2, IMAGE], [7, IMAGE]]
    for number, (prompt, images) in enumerate(zip(prompts, (["a"], ["a", "b"], ["a"]), strict=True)):
        read = rows(len(prompt) + sum(lengths[image] - 1 for image in images), number)
        turn = TurnRecord(prompt, [10 + number], "stop", [-1.0], images=images, experts=TurnExperts(read))
        asked = [{"role": "user", "content": "q"}, said, {"role": "user", "content": "r"}][: len(prompt)]
        asked = [{"role": "user", "content": "other"}] if number == 2 else asked[: 1 + 2 * number]
        manager.record_turn("s", turn=turn, prompt_messages=asked, response_message=said)
    samples = manager.get_trajectory("s", base_sample=Sample(index=0), placeholders=Placeholders(IMAGE, lengths))
    assert [sample.tokens for sample in samples] == [[1, 9, 9, 9, 10, 2, 9, 9, 11], [7, 9, 9, 9, 12]]
    assert [numbers(sample) for sample in samples] == [[0, 0, 0, 0, 1, 1, 1, 1], [2, 2, 2, 2]]
