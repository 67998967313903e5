"""Trajectories that no trainer can take are refused when they are written, or cost the group that they are of."""

from __future__ import annotations

from typing import Any

import pytest

from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.types import iter_samples
from slime_plugins.rollout_buffer import rollout_buffer_example
from slime_plugins.rollout_buffer.group_queue import GroupQueue, ItemError
from slime_plugins.rollout_buffer.rollout_buffer_example import Progress, generate_rollout
from tests.support.arguments import run_args
from tests.unit.slime_plugins.test_group_queue import item
from tests.unit.slime_plugins.test_rollout_buffer import ChatML, Source

RECORD = {"tokens": [5, 6, 7], "response_length": 2, "loss_mask": [1, 0], "rollout_log_probs": [-0.5, 0.0]}
USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}


def changed(**fields: Any) -> dict[str, Any]:
    return {**item("u"), **fields}


def sampled(**fields: Any) -> dict[str, Any]:
    return changed(samples=[{**RECORD, **fields}])


POISON: list[tuple[dict[str, Any], str]] = [
    (changed(messages=[USER]), "assistant"),
    (changed(messages=[]), "messages"),
    (changed(messages=[{"role": "assistant"}]), "messages[0].content"),
    (changed(messages=[USER, {"role": "assistant", "content": None}]), "messages[1].content"),
    (changed(messages=[USER, {"role": "assistant", "content": 5}]), "messages[1].content"),
    (changed(messages=[USER, {"role": "assistant", "content": ["r"]}]), "messages[1].content"),
    (changed(messages=[{"role": 3, "content": "q"}, ASSISTANT]), "messages[0]"),
    (changed(messages=[USER, {**ASSISTANT, "tool_calls": "f()"}]), "messages[1].tool_calls"),
    (changed(extra_info={"tools": "add"}), "extra_info.tools"),
    (changed(extra_info={"tools": ["add"]}), "extra_info.tools"),
    (changed(extra_info=None), "extra_info"),
    *((changed(reward=reward), "reward") for reward in (
        None, "good", "1.0", [1.0], {}, {"score": None}, {"score": "a"}, float("nan"), float("inf"), 10**400,
    )),
    (changed(uid=""), "uid"),
    (changed(uid=3), "uid"),
    (changed(instance_id=True), "instance_id"),
    (changed(instance_id=1.5), "instance_id"),
    (changed(samples=[]), "samples"),
    (changed(samples={}), "samples"),
    (changed(samples=[RECORD, {**RECORD, "rollout_log_probs": None}]), "rollout_log_probs"),
    (sampled(tokens=[5, 6, 2**62]), "samples[0].tokens"),
    (sampled(tokens=[5, 6, 10**9]), "samples[0].tokens"),
    (sampled(tokens=[5, 6, 100]), "samples[0].tokens"),
    (sampled(tokens=[5, 6, -1]), "samples[0].tokens"),
    (sampled(tokens=[5, 6, True]), "samples[0].tokens"),
    (sampled(tokens=[5, 6, 7.0]), "samples[0].tokens"),
    (sampled(tokens=None), "samples[0].tokens"),
    (sampled(tokens=[6, 7]), "samples[0].response_length"),
    (sampled(response_length=0), "samples[0].response_length"),
    (sampled(response_length=2.0), "samples[0].response_length"),
    (sampled(response_length=True), "samples[0].response_length"),
    (sampled(loss_mask=[1, 2]), "samples[0].loss_mask"),
    (sampled(loss_mask=[1, 0.5]), "samples[0].loss_mask"),
    (sampled(loss_mask=[True, False]), "samples[0].loss_mask"),
    (sampled(loss_mask=[1]), "samples[0].loss_mask"),
    (sampled(rollout_log_probs=[-0.5, 5.0]), "samples[0].rollout_log_probs"),
    (sampled(rollout_log_probs=[-0.5, True]), "samples[0].rollout_log_probs"),
    (sampled(rollout_log_probs=[-0.5, None]), "samples[0].rollout_log_probs"),
    (sampled(rollout_log_probs=[-0.5, float("nan")]), "samples[0].rollout_log_probs"),
    (sampled(rollout_log_probs=[-0.5, float("-inf")]), "samples[0].rollout_log_probs"),
    (sampled(rollout_log_probs=[-0.5]), "samples[0].rollout_log_probs"),
    (sampled(rollout_log_probs=[]), "samples[0].rollout_log_probs"),
    (sampled(metadata=["a"]), "samples[0].metadata"),
    (sampled(response=7), "samples[0].response"),
    (sampled(weight_versions="3"), "samples[0].weight_versions"),
    (sampled(agent_session=[]), "samples[0].agent_session"),
]  # fmt: skip


@pytest.mark.parametrize(("written", "named"), POISON, ids=range(len(POISON)))
def test_what_the_trainer_could_not_take_is_refused_with_the_field(written, named):
    queue = GroupQueue(1, "external", vocab_size=100)
    with pytest.raises(ItemError) as caught:
        queue.write(written)
    assert named in str(caught.value)
    assert (queue.held, len(str(caught.value)) < 400) == (0, True)


@pytest.mark.parametrize(
    "written",
    [
        changed(), changed(reward=0), changed(reward=True), changed(reward={"score": 1.0, "note": "a"}),
        changed(instance_id=7), changed(extra_info={"error": "no"}, messages=[USER]), sampled(),
        changed(messages=[USER, {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}]),
        changed(messages=[USER, {"role": "assistant", "content": None, "reasoning_content": "hm"}, ASSISTANT]),
        changed(messages=[USER, {"role": "assistant", "content": None, "function_call": {"name": "f"}}, ASSISTANT]),
        changed(messages=[{"role": "user", "content": [{"type": "text", "text": "q"}]}, ASSISTANT]),
        sampled(rollout_log_probs=[-0.5, 1e-6]), sampled(rollout_log_probs=None), sampled(tokens=[5, 6, 99]),
        {**sampled(), "messages": [USER]},
    ],
)  # fmt: skip
def test_what_can_be_trained_on_is_taken(written):
    queue = GroupQueue(1, "external", vocab_size=100)
    queue.write(written)
    assert queue.held == 1


def test_rewards_that_are_objects_need_the_key_of_the_run():
    queue = GroupQueue(1, "external", reward_key="score")
    with pytest.raises(ItemError, match=r"finite number at 'score' \(--reward-key\)"):
        queue.write(changed(reward={"other": 1.0}))
    queue.write(changed(reward={"score": 1.0}))


@pytest.mark.parametrize("first", [True, False])
def test_trajectories_of_one_group_have_log_probs_all_or_none(first):
    queue = GroupQueue(3, "external")
    kinds = {True: {**sampled(), "uid": "with"}, False: {**sampled(rollout_log_probs=None), "uid": "without"}}
    queue.write(kinds[first])
    queue.write({**item("failed", error="no"), "samples": []})  # fits both
    with pytest.raises(ItemError, match="samples must have rollout_log_probs where the other trajectories"):
        queue.write(kinds[not first])
    assert queue.held == 2


class Buffer:
    """In the place of the buffer's address: hands out batches of items, whatever they are."""

    def __init__(self, *batches: list[Any]) -> None:
        self.batches = list(batches)

    async def fetch(self, *_: Any) -> tuple[list[Any], dict[str, Any]]:
        meta = {"generator": {"state": "running"}}
        return (self.batches.pop(0), meta) if self.batches else ([], {"generator": {"state": "failed"}})


@pytest.fixture
def roll_out(monkeypatch):
    """``roll_out(*batches, **args)``: one rollout of what got through the buffer."""
    monkeypatch.setattr(rollout_buffer_example, "_started", {"http://127.0.0.1:1": Progress()})
    masks = MultiTurnLossMaskGenerator(ChatML(), "qwen")
    monkeypatch.setattr(rollout_buffer_example, "mask_generator", lambda *a: masks)

    def run(*batches: list[Any], source: Source | None = None, **changes: Any) -> Any:
        monkeypatch.setattr(rollout_buffer_example, "_fetch", Buffer(*batches).fetch)
        values = {
            "rollout_buffer_url": "http://127.0.0.1:1", "rollout_task_type": "external", "hf_checkpoint": "none",
            "rollout_batch_size": 2, "n_samples_per_prompt": 1, "num_rollout": None, "loss_mask_type": "qwen",
            "rollout_request_timeout": 60.0, "fetch_trajectory_retry_times": -1, "vocab_size": 100,
        }  # fmt: skip
        return generate_rollout(run_args(**{**values, **changes}), 0, Source(0) if source is None else source)

    return run


def good(number: int, **fields: Any) -> dict[str, Any]:
    return {**sampled(**fields), "uid": f"good-{number}", "instance_id": f"good-{number}"}


@pytest.mark.parametrize("written", [one for one, named in POISON if named != "instance_id"][::3])
def test_a_bad_group_that_gets_through_costs_itself(roll_out, written):
    """As that of a group function of the user's, or of a buffer of another version."""
    bad = {**written, "instance_id": "bad"}
    source = Source(0)
    found = roll_out([good(1), bad], [good(2)], source=source)
    assert [sample.metadata["uid"] for sample in iter_samples(found.samples)] == ["good-1", "good-2"]
    assert found.metrics["rollout/buffer/bad_groups"] == 1
    assert source.metadata["rollout_buffer_fetched"]["0"] == ["bad", "good-1", "good-2"]
    assert source.metadata[rollout_buffer_example.COUNTER] == 2


@pytest.mark.parametrize("members", [1, 3])
def test_a_group_of_another_size_costs_itself(roll_out, members):
    odd = [{**good(n), "instance_id": "odd"} for n in range(members)]
    twos = [{**good(n), "instance_id": f"two-{n // 2}"} for n in range(10, 14)]
    found = roll_out([*odd, *twos], n_samples_per_prompt=2)
    assert [len(group) for group in found.samples] == [2, 2]
    assert found.metrics["rollout/buffer/bad_groups"] == 1


def test_a_template_that_raises_costs_the_group(roll_out):
    bad = {**changed(messages=[{"role": "user", "content": "q", "x": 1}, ASSISTANT]), "instance_id": "bad"}

    class Raises(ChatML):
        def apply_chat_template(self, messages: Any, **options: Any) -> Any:
            if "x" in messages[0]:
                raise TypeError("cannot render")
            return super().apply_chat_template(messages, **options)

    rollout_buffer_example.mask_generator = lambda *a: MultiTurnLossMaskGenerator(Raises(), "qwen")
    found = roll_out([bad, {**item("1", "b")}, {**item("2", "c")}])
    assert found.metrics["rollout/buffer/bad_groups"] == 1


def test_log_probs_of_some_groups_are_not_used_and_needed_ones_cost_the_others(roll_out):
    mixed = [good(1), good(2, rollout_log_probs=None), good(3)]
    found = roll_out(mixed[:2])
    assert [sample.rollout_log_probs for sample in iter_samples(found.samples)] == [None, None]
    found = roll_out(mixed, use_tis=True)
    assert [sample.metadata["uid"] for sample in iter_samples(found.samples)] == ["good-1", "good-3"]
    assert found.metrics["rollout/buffer/bad_groups"] == 1


def test_an_object_as_reward_needs_the_flag(roll_out):
    scored = [{**good(n), "reward": {"score": 0.5}} for n in (1, 2)]
    assert len(roll_out(scored, reward_key="score").samples) == 2
    with pytest.raises(RuntimeError, match="has stopped"):
        roll_out(scored)


def test_nothing_but_bad_groups_ends_the_run_with_the_reason(roll_out, monkeypatch):
    monkeypatch.setattr(rollout_buffer_example, "MOST_BAD_GROUPS", 5)
    bad = [{**changed(reward=None), "uid": str(n), "instance_id": str(n)} for n in range(3)]
    with pytest.raises(RuntimeError, match="6 groups in a row cannot be trained on; the last one: group 2: reward"):
        roll_out(bad, bad)
