"""Users' functions within rollouts: what they are given, what they may return, how they fail."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest

from slime.rollout import data_source, rm_hub, sample_hooks
from slime.rollout.base_types import iter_samples
from slime.rollout.data_source import RolloutDataSourceWithBuffer, draw_groups
from slime.rollout.hooks.hook import find_hook, finish, make_hook
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.rm_hub.errors import RewardErrors
from slime.rollout.rm_hub.failure import BadReward
from slime.rollout.sample_hooks import apply_rollout_sample_hooks, apply_sample_hooks
from slime.rollout.sglang_rollout import call_generate, generate_hook, generate_rollout
from slime.utils.async_utils import run
from slime.utils.misc import load_function
from slime.utils.types import Sample
from tests.support.error_text import line_of, notes_of
from tests.support.rollout_args import rollout_args

HERE = __name__
FILE = __file__


def sample_hook(args: Any, sample: Sample, rollout_id: int | None = None) -> Sample | None:
    sample.metadata["seen"] = rollout_id
    return None


def blocking_generate(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    args.began.set()
    assert args.go.wait(20)
    sample.response = f"evaluation={evaluation}"
    return sample


async def tuple_generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Any:
    return sample, [Sample(index=8), (Sample(index=9),)]


async def none_generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Any:
    sample.response = "done, and nothing returned"


def gated() -> Namespace:
    return Namespace(**vars(rollout_args()), began=threading.Event(), go=threading.Event())


async def test_a_plain_generate_function_does_not_keep_the_loop():
    args, sample = gated(), Sample(index=1, metadata={"kept": 1})
    fn = make_hook(f"{HERE}.blocking_generate", "custom_generate_function_path")
    call = asyncio.create_task(call_generate(fn, args, sample, {}, evaluation=True))
    await asyncio.to_thread(args.began.wait, 20)  # this line runs, so the loop is free
    args.go.set()
    assert await call is sample
    assert sample.response == "evaluation=True"
    assert sample.metadata == {"kept": 1}


async def test_a_plain_generate_function_that_is_cancelled_changes_nothing_any_more():
    args, sample = gated(), Sample(index=1)
    fn = make_hook(f"{HERE}.blocking_generate", "custom_generate_function_path")
    call = asyncio.create_task(call_generate(fn, args, sample, {}, evaluation=False))
    await asyncio.to_thread(args.began.wait, 20)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    args.go.set()
    for thread in [t for t in threading.enumerate() if t.name == "hook-blocking_generate"]:
        await asyncio.to_thread(thread.join, 20)
    assert sample == Sample(index=1)


async def test_what_generate_functions_return():
    sample = Sample(index=1, group_index=0)
    fn = make_hook(f"{HERE}.tuple_generate", "custom_generate_function_path")
    found = await call_generate(fn, rollout_args(), sample, {}, evaluation=False)
    assert [found[0].index, found[1][0].index, found[1][1][0].index] == [1, 8, 9]
    assert isinstance(found, list)
    assert isinstance(found[1][1], list)  # all that follows knows lists
    fn = make_hook(f"{HERE}.none_generate", "custom_generate_function_path")
    message = r"--custom-generate-function-path .*none_generate' \(.*:\d+\) returned NoneType, for sample index=1 "
    with pytest.raises(TypeError, match=message + "group_index=0; expected a Sample"):
        await call_generate(fn, rollout_args(), sample, {}, evaluation=False)


def test_the_generate_function_of_a_sample_wins_and_is_loaded_through_a_patched_loader():
    args = rollout_args(custom_generate_function_path=f"{HERE}.none_generate")
    own = Sample(generate_function_path=f"{HERE}.tuple_generate")
    found = generate_hook(args, own, load_function)
    assert found is not None
    assert found.function is tuple_generate
    assert str(found).startswith("generate_function_path of the sample '")
    assert generate_hook(args, Sample(), load_function).function is none_generate  # type: ignore[union-attr]
    assert generate_hook(args, Sample(), lambda path: path.upper()).function == f"{HERE}.none_generate".upper()  # type: ignore[union-attr]
    assert generate_hook(rollout_args(), Sample(), load_function) is None


async def test_hooks_are_looked_up_through_the_names_that_users_patch(make_args, monkeypatch):
    """With the signature that ``load_function`` is called with by everybody: one path."""
    asked = []

    def load(path: str) -> Any:
        asked.append(path)
        return {"my.filter": newest_first, "my.hook": sample_hook, "my.rm": plain_rm}[path]

    for module in (data_source, sample_hooks, rm_hub):
        monkeypatch.setattr(module, "load_function", load)
    source = RolloutDataSourceWithBuffer(make_args(buffer_filter_path="my.filter"))
    source.add_samples([[Sample(index=i), Sample(index=i)] for i in range(3)])
    assert source.get_samples(1)[0][0].index == 2
    one = await apply_sample_hooks(rollout_args(rollout_sample_hook_path=["my.hook"]), Sample(index=5), rollout_id=1)
    assert one.metadata == {"seen": 1}
    assert await async_rm(rollout_args(custom_rm_path="my.rm"), one) == 5.0
    assert await async_rm(rollout_args(), Sample(index=6, custom_rm_path="my.rm")) == 6.0
    assert asked == ["my.filter", "my.hook", "my.rm", "my.rm"]


def newest_first(args: Any, rollout_id: None, buffer: list[Any], num_samples: int) -> list[Any]:
    return [buffer.pop() for _ in range(min(num_samples, len(buffer)))]


# Rewards


def plain_rm(args: Any, sample: Any, **kwargs: Any) -> Any:
    if isinstance(sample, list):
        return [float(s.index) for s in sample]
    return float(sample.index)


async def rm(args: Any, sample: Any, **kwargs: Any) -> Any:
    return plain_rm(args, sample)


async def text_rm(args: Any, sample: Any, **kwargs: Any) -> Any:
    return "1.0"


async def no_rm(args: Any, sample: Any, **kwargs: Any) -> Any:
    return None


async def raising_rm(args: Any, sample: Any, **kwargs: Any) -> Any:
    raise KeyError("no judge")


@pytest.mark.parametrize("name", ["plain_rm", "rm"])
async def test_rewards_of_both_forms_for_one_and_for_many(name):
    args = rollout_args(custom_rm_path=f"{HERE}.{name}", group_rm=True)
    samples = [Sample(index=n) for n in (4, 5)]
    assert await async_rm(args, samples[0]) == 4.0
    assert await batched_async_rm(args, samples) == [4.0, 5.0]
    assert await async_rm(rollout_args(), Sample(index=6, custom_rm_path=f"{HERE}.{name}")) == 6.0


async def test_rewards_that_cannot_be_are_named():
    for name, seen in (("text_rm", "str '1.0'"), ("no_rm", "NoneType")):
        args = rollout_args(custom_rm_path=f"{HERE}.{name}")
        message = (
            rf"--custom-rm-path .*{name}' \(.*test_hooks_in_rollouts.py:\d+\) returned {seen}, for sample index=3 "
            "group_index=1; expected the reward of one sample, a number or a dict"
        )
        with pytest.raises(TypeError, match=message):
            await async_rm(args, Sample(index=3, group_index=1))
    for later in ("custom_reward_post_process_path", "custom_convert_samples_to_train_data_path"):
        assert await async_rm(rollout_args(custom_rm_path=f"{HERE}.no_rm", **{later: "my.fn"}), Sample()) is None
    with pytest.raises(BadReward, match=r"--custom-rm-path .*returned str '1.0'"):  # no failure to tolerate, a mistake
        await RewardErrors().score_one(rollout_args(custom_rm_path=f"{HERE}.text_rm"), Sample(), async_rm)
    args = rollout_args(custom_rm_path=f"{HERE}.text_rm", group_rm=True)
    with pytest.raises(BadReward, match=r"must return a list"):
        await RewardErrors().score_batch(args, [Sample(), Sample()], batched_async_rm)
    with pytest.raises(ValueError, match=r"--custom-rm-path .*was given 2 samples .* must return a list .* got '1.0'"):
        await batched_async_rm(rollout_args(custom_rm_path=f"{HERE}.text_rm"), [Sample(), Sample()])


async def test_a_failed_reward_says_in_its_sample_s_log_line_which_hook_it_was(caplog):
    errors, sample = RewardErrors(), Sample(index=3, group_index=1)
    await errors.score_one(rollout_args(custom_rm_path=f"{HERE}.raising_rm"), sample, async_rm)
    assert sample.remove_sample
    assert f"in --custom-rm-path '{HERE}.raising_rm' ({FILE}:{line_of(raising_rm)})" in caplog.text


# Data sources


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (None, "returned NoneType.*expected a list of groups"),
        ([Sample(index=1)], "returned Sample .*expected a list of groups"),
        ([[Sample()]], "returned a group of 1 samples; expected --n-samples-per-prompt 2"),
    ],
)
def test_what_a_data_source_hands_out_is_looked_at(groups, message):
    def get_samples(n: int) -> Any:
        return groups

    with pytest.raises(
        (TypeError, ValueError), match=rf"--data-source-path 'my.Source' \(.*test_hooks_in_rollouts.py:\d+\).*{message}"
    ):
        draw_groups(rollout_args(data_source_path="my.Source"), get_samples, 3)


def test_an_error_in_a_data_source_names_it():
    def get_samples(n: int) -> Any:
        raise OSError("the prompt file is gone")

    with pytest.raises(OSError, match="gone") as caught:
        draw_groups(rollout_args(data_source_path="my.Source"), get_samples, 3)
    assert "in --data-source-path 'my.Source'" in notes_of(caught)


def test_finish_waits_for_any_awaitable_and_passes_on_the_rest():
    async def slow() -> int:
        await asyncio.sleep(0)
        return 3

    assert finish(3) == 3
    assert finish(slow()) == 3

    async def on_the_loop() -> Any:
        return finish(slow())

    assert run(on_the_loop()) == 3
    assert find_hook(rollout_args(), "custom_rm_path") is None


def takes_some(args: Any, sample: Sample, *, evaluation: bool, source: str = "") -> None:
    sample.metadata = {"evaluation": evaluation, "source": source}


async def test_hooks_get_the_further_keywords_that_they_accept():
    args = SimpleNamespace(rollout_sample_hook_path=[f"{__name__}.takes_some"])
    (sample,) = await apply_rollout_sample_hooks(args, [Sample()], evaluation=True, source="mine", unknown=1)
    assert sample.metadata == {"evaluation": True, "source": "mine"}


# Samples of a subclass


@dataclasses.dataclass
class Chat(Sample):
    messages: list[str] = dataclasses.field(default_factory=list)


class ChatSource(RolloutDataSourceWithBuffer):
    def get_samples(self, num_samples: int) -> list[Any]:
        groups = super().get_samples(num_samples)
        for group in groups:
            group[:] = [s if isinstance(s, Chat) else Chat(**s.__dict__, messages=[str(s.prompt)]) for s in group]
        return groups


@pytest.mark.parametrize("partial", [False, True])
def test_samples_of_a_subclass_keep_their_class_in_the_rollout_and_in_the_buffer(make_args, tmp_path, partial):
    args = make_args(partial_rollout=partial, over_sampling_batch_size=6, save=str(tmp_path), load=str(tmp_path))
    source = ChatSource(args)
    done = list(iter_samples(generate_rollout(args, 0, source).samples))
    assert {type(s) for s in done} == {Chat}
    assert all(s.messages == [s.prompt] and s.reward is not None for s in done)
    assert {type(Chat(**s.__dict__)) for s in done} == {Chat}  # with the trace that generation gave them
    source.add_samples([[Chat(index=98, messages=["kept"]), Chat(index=99)]])
    source.snapshot(0)
    source.save(0)
    resumed = ChatSource(args)
    resumed.load(0)
    kept = [s for s in iter_samples(resumed.get_samples(20)) if s.index == 98]
    assert [(type(s), s.messages) for s in kept] == [(Chat, ["kept"])]
