"""The state that all requests of a process share, as plug-ins read it."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest

from slime.observability.logging_utils import _TensorboardAdapter
from slime.rollout import eval_rollout, sglang_rollout
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.requests.generate_state import PromptTokens, request_limit
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample, iter_samples
from tests.support.rollout_args import CharTokenizer, eval_config, rollout_args, write_prompts


@pytest.fixture
def make_state(monkeypatch):
    monkeypatch.setattr(sglang_rollout, "load_tokenizer", lambda path, **k: CharTokenizer())
    SingletonMeta.clear_instances()
    yield lambda **flags: sglang_rollout.GenerateState(rollout_args(**flags))
    SingletonMeta.clear_instances()


def test_requests_are_limited_by_the_engines_of_the_model_that_is_asked():
    args = rollout_args(sglang_server_concurrency=5, rollout_num_engines=4)
    assert request_limit(args) == 20
    args.sglang_model_engines = {"actor": 3, "judge": 1}
    assert request_limit(args) == 15


def test_there_is_one_per_process(make_state):
    state = make_state(rollout_temperature=0.7)
    assert make_state(rollout_temperature=0.7) is state, "copies of the arguments share it"
    assert sglang_rollout.GenerateState(state.args) is state


def test_it_follows_its_arguments(make_state):
    first = make_state(rollout_temperature=1.0)
    second = make_state(rollout_temperature=0.5, rollout_max_response_len=99)
    assert (second.sampling_params["temperature"], second.sampling_params["max_new_tokens"]) == (0.5, 99)
    assert first.sampling_params["temperature"] == 1.0


async def test_requests_in_flight_share_it_whatever_their_arguments(make_state):
    state = make_state(rollout_temperature=0.7)
    async with state.semaphore:
        assert make_state(rollout_temperature=0.1) is state
    state.pendings.add(asyncio.current_task())
    assert make_state(rollout_temperature=0.1) is state
    state.reset()
    assert make_state(rollout_temperature=0.1) is not state


def test_other_singletons_follow_their_arguments_too(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    SingletonMeta.clear_instances()
    one, same, other = (
        _TensorboardAdapter(rollout_args(use_tensorboard=True, tb_project_name=name)) for name in ("a", "a", "b")
    )
    assert one is same is not other
    other.log({"x": 1.0}, 0)
    for adapter in (one, other):
        adapter.finish()
    assert sorted(path.name for path in (tmp_path / "tensorboard_log").iterdir()) == ["a", "b"]
    SingletonMeta.clear_instances()


@pytest.mark.parametrize(
    "change",
    [{"apply_chat_template_kwargs": {"x": 1}}, {"eval_max_prompt_len": 1000}, {"trust_remote_code": True}],
)
def test_data_sets_of_evaluations_are_kept_by_what_they_are_made_with(tmp_path, monkeypatch, change):
    monkeypatch.setattr(eval_rollout, "EVAL_PROMPT_DATASET", {})
    config = eval_config(str(write_prompts(tmp_path / "e.jsonl", 2)), "e")
    state = SimpleNamespace(tokenizer=CharTokenizer(), processor=None)
    first = eval_rollout._load_dataset(rollout_args(), config, state)
    assert eval_rollout._load_dataset(rollout_args(), config, state) is first
    assert eval_rollout._load_dataset(rollout_args(**change), config, state) is not first


def test_as_many_requests_as_the_engines_take(make_state):
    state = make_state(
        sglang_server_concurrency=3, rollout_num_engines=None, rollout_num_gpus=8, rollout_num_gpus_per_engine=2
    )
    assert state.semaphore._value == 3 * 4


def test_samples_of_a_group_have_seeds_of_their_own(make_state):
    assert make_state(rollout_seed=40, n_samples_per_prompt=3).group_sampling_seeds == [40, 41, 42]


def test_the_least_used_data_parallel_rank_is_next(make_state):
    state = make_state(sglang_dp_size=3)
    assert (state.dp_rank, state.dp_counts) == (0, [0, 0, 0])
    with state.dp_rank_context() as first, state.dp_rank_context() as second:
        assert (first, second, state.dp_rank) == (0, 1, 1)
        with state.dp_rank_context() as third:
            assert (third, state.dp_rank, state.dp_counts) == (2, 2, [1, 1, 1])
        with state.dp_rank_context() as again:
            assert again == 2
    assert state.dp_counts == [0, 0, 0]


def test_a_rank_is_given_back_by_a_request_that_fails(make_state):
    state = make_state(sglang_dp_size=2)
    with pytest.raises(RuntimeError), state.dp_rank_context():
        raise RuntimeError
    assert state.dp_counts == [0, 0]


async def test_groups_become_tasks_and_a_reset_forgets_them(make_state, monkeypatch):
    async def mine(args, group, sampling_params, evaluation=False):
        sampling_params["temperature"] = -1  # a task's own copy
        return [(sample.index, evaluation) for sample in group]

    monkeypatch.setattr(sglang_rollout, "generate_and_rm_group", mine)
    state = make_state(rollout_temperature=0.5)
    state.submit_generate_tasks([[Sample(index=0), Sample(index=1)], [Sample(index=2)]])
    assert (state.remaining_batch_size, len(state.pendings)) == (2, 2)
    results = sorted([await task for task in list(state.pendings)])
    assert results == [[(0, False), (1, False)], [(2, False)]]
    assert state.sampling_params["temperature"] == 0.5
    state.aborted = True
    state.reset()
    assert (state.remaining_batch_size, state.pendings, state.aborted) == (0, set(), False)


class CountingTokenizer:
    def __init__(self, offset: int = 0) -> None:
        self.offset, self.asked = offset, []

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        self.asked.append(text)
        return [ord(c) + self.offset for c in text]


def test_a_prompt_is_tokenized_once_for_its_group():
    tokens, tokenizer = PromptTokens(), CountingTokenizer()
    for prompt in ("a", "a", "ab", "a", "ab"):
        ids = tokens.of(tokenizer, prompt)
        assert ids == [ord(c) for c in prompt]
        ids.append(0)  # a sample's own
    assert tokenizer.asked == ["a", "ab"]
    assert tokens.of(CountingTokenizer(1), "a") == [98]
    for number in range(2 * PromptTokens.KEPT):
        tokens.of(tokenizer, str(number))
    assert len(tokens._ids) == PromptTokens.KEPT


def test_the_samples_of_a_prompt_can_stay_together(cluster, make_args):
    args = make_args(router_policy="consistent_hashing", sglang_routing_key="group")
    samples = sglang_rollout.generate_rollout(args, 0, RolloutDataSourceWithBuffer(args)).samples
    keys = Counter(headers["X-SMG-Routing-Key"] for engine in cluster.engines for headers in engine.headers)
    assert keys == Counter(f"group-{sample.group_index}" for sample in iter_samples(samples))
