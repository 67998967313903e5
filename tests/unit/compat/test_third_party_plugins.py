"""Plugins that other projects build on slime, one of each kind, run by slime as it runs them in training."""

from __future__ import annotations

import importlib
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from slime.backends.megatron_utils.loss import compute_advantages_and_returns, loss_function
from slime.backends.megatron_utils.train.hooks import load_trainer_hooks
from slime.observability import tracking
from slime.ray.manager.conversion import Converter
from slime.rollout import sglang_rollout
from slime.rollout.base_types import call_rollout_fn, iter_samples
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.utils.async_utils import run
from slime.utils.misc import load_function
from slime.utils.types import Sample
from tests.support import third_party
from tests.support.arguments import parse, run_args
from tests.support.reference_calls import check_equal
from tests.support.rollout_manager import manager_maker
from tests.support.standin import StandInCluster
from tests.unit.backends.megatron_utils.test_loss import make_args as loss_args
from tests.unit.backends.megatron_utils.test_loss import make_batch, reducer

HERE = "tests.support.third_party."
ONE_RANK = {"dp_size": 1, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}


@pytest.fixture(autouse=True)
def nothing_seen():
    third_party.SEEN.clear()


def roll_out(args: Any, source: Any = None, **call: Any) -> Any:
    """Run the rollout function as the manager does."""
    function = load_function(args.rollout_function_path)
    source = RolloutDataSourceWithBuffer(args) if source is None else source
    return call_rollout_fn(function, args, 0, source, evaluation=call.get("evaluation", False))


def group(*, length: int = 4, index: int = 0) -> list[Sample]:
    """A finished group of two, of which the second is longer."""
    made = []
    for n in range(2):
        count = length + n
        made.append(
            Sample(index=2 * index + n, group_index=index, prompt="p", label="4", tokens=[1, *range(count)],
                   response="4", response_length=count, rollout_log_probs=[-1.0] * count, reward=float(n),
                   status=Sample.Status.COMPLETED)
        )  # fmt: skip
    return made


def shard(args: Any, samples: list[Sample]) -> dict[str, Any]:
    """Return the shard of ``samples`` of a trainer with one rank."""
    converter = Converter(args)
    converter.train_parallel_config = ONE_RANK
    (found,) = converter.shards(samples)
    return found.to_rollout_data()


# Generation


def test_a_rollout_function_with_a_loop_of_its_own(make_args):
    args = make_args(
        rollout_function_path=HERE + "rollout", rollout_batch_size=3, over_sampling_batch_size=3,
        dynamic_sampling_filter_path=HERE + "keep_even",
    )  # fmt: skip
    output = roll_out(args)
    assert [found[0].group_index for found in output.samples] == sorted(
        {s.group_index for s in iter_samples(output.samples)}
    )
    assert all(sample.group_index % 2 == 0 and sample.reward is not None for sample in iter_samples(output.samples))
    assert sglang_rollout.GenerateState(args).remaining_batch_size == 0


def test_a_rollout_function_that_returns_bare_groups_and_evaluations(make_args):
    args = make_args(rollout_function_path=HERE + "legacy_rollout", rollout_batch_size=2)
    assert [len(found) for found in roll_out(args).samples] == [2, 2]
    assert roll_out(args, evaluation=True).data["mine"]["rewards"] == [1.0, 0.0]


def test_an_evaluation_function_around_another_one(make_args):
    output = roll_out(make_args(rollout_function_path=HERE + "evaluate"), evaluation=True)
    assert set(output.data) == {"mine", "more"}
    assert output.metrics == {"x": 1}


def test_traffic_of_a_proxy_becomes_samples(make_args):
    args = make_args(rollout_function_path=HERE + "proxied_rollout", rollout_batch_size=1)
    proxy = third_party.Proxy(args)
    try:
        for text in ("one", "two"):
            body = {"model": "any", "messages": [{"role": "user", "content": text}]}
            url = f"http://127.0.0.1:{proxy.handle.port}/v1/chat/completions"
            reply = requests.post(url, data=json.dumps(body), timeout=60).json()
            assert reply["choices"][0]["message"]["content"]
    finally:
        proxy.handle.stop()
    ((first, second),) = roll_out(args).samples
    assert (first.prompt, second.prompt) == ("user:one\n", "user:two\n")
    data = shard(run_args(rollout_batch_size=1, n_samples_per_prompt=2, global_batch_size=2), [first, second])
    assert data["response_lengths"] == [first.response_length, second.response_length]


def generated(args: Any, sample: Sample, evaluation: bool = False) -> Any:
    params = {"max_new_tokens": 8, "temperature": 1.0}
    return run(sglang_rollout.generate_and_rm(args, sample, params, evaluation=evaluation))


def test_a_generate_function_with_requests_and_masks_of_its_own(make_args):
    args = make_args(
        custom_generate_function_path=HERE + "with_tool", custom_rm_path=HERE + "reward", reward_key="score",
        rollout_sample_hook_path=[HERE + "mark"],
    )  # fmt: skip
    found = generated(args, Sample(index=0, group_index=0, prompt="2+2=", label="4"))
    tool = [ord(c) for c in "<result>4</result>"]
    masked = [token for token, on in zip(found.tokens[4:], found.loss_mask, strict=True) if not on]
    assert masked == tool
    assert found.response_length == len(found.rollout_log_probs) == len(found.loss_mask)
    assert found.get_reward_value(args) == found.response_length - 0.1
    assert "seen_by_hook" in found.metadata


def test_several_agents_make_nested_samples_of_one_trajectory(make_args):
    args = make_args(custom_generate_function_path=HERE + "solvers", rollout_batch_size=2)
    args.rollout_function_path = "slime.rollout.sglang_rollout.generate_rollout"
    output = roll_out(args)
    assert args.solver_calls >= 4
    for found in output.samples:
        for first, others in found:
            assert len(others) == 2
            assert {one.rollout_id for one in (first, *others)} == {first.index}
    one = generated(args, Sample(index=0, group_index=0, prompt="p", label="l"), evaluation=True)
    assert isinstance(one, Sample)


def test_a_function_in_the_place_of_one_of_slimes(make_args, monkeypatch):
    calls = []

    async def counted(*given: Any, **named: Any) -> Any:
        calls.append(given)
        return await third_party.group_at_once(*given, **named)

    monkeypatch.setattr(sglang_rollout, "generate_and_rm_group", counted)
    args = make_args(rollout_function_path="slime.rollout.sglang_rollout.generate_rollout", rollout_batch_size=2)
    output = roll_out(args)
    assert len(calls) >= 2
    assert all(sample.reward is not None for sample in iter_samples(output.samples))


def test_a_second_model_has_an_address_of_its_own(make_args):
    with StandInCluster(1) as other:
        other.engines[0].reply = lambda ids, params: [ord("A")]
        args = make_args(custom_generate_function_path=HERE + "route_to_judge")
        args.sglang_model_routers = {"judge": (other.host, other.port)}
        found = generated(args, Sample(index=0, group_index=0, prompt="p", label="l"))
        assert found.metadata["verdict"] == "A"
        assert other.engines[0].requests[0]["text"] == found.response


# Rewards


def test_a_reward_of_groups(make_args):
    args = make_args(group_rm=True, custom_rm_path=HERE + "group_reward", rollout_batch_size=2)
    args.rollout_function_path = "slime.rollout.sglang_rollout.generate_rollout"
    for found in roll_out(args).samples:
        assert sorted(sample.reward for sample in found) == [0.0, 1.0]


@pytest.mark.parametrize(("kind", "response", "expected"), [
    ("math", r"\boxed{4}", 1.0), ("math", r"\boxed{5}", 0.0), ("box", r"so \boxed{4}", 1.0), ("words", "4", 1.0),
    (None, "4", {"f1": 1.0}),
])  # fmt: skip
def test_a_reward_by_the_kind_of_the_sample(make_args, kind, response, expected):
    args = make_args(custom_rm_path=HERE + "reward_by_kind")
    sample = Sample(index=0, prompt="p", response=response, label="4", metadata={"kind": kind} if kind else {})
    found = run(sglang_rollout.async_rm(args, sample))
    assert found == (1.0 if kind is None else expected)
    assert run(sglang_rollout.batched_async_rm(args, [sample, sample])) == [found, found]


TRAINING = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "global_batch_size": 4}


def test_rewards_are_processed_by_the_projects_own_rule():
    args = run_args(**TRAINING, custom_reward_post_process_path=HERE + "post_process")
    data = shard(args, [*group(), *group(index=1)])
    by_sample = dict(zip(data["sample_indices"], data["rewards"], strict=True))
    assert by_sample == {0: -1.0, 1: 1.0, 2: -1.0, 3: 1.0}


def test_turns_become_rows_with_keys_of_their_own():
    samples = [*group(), *group(index=1)]
    turn = {"tokens": [1, 2, 3], "response_length": 2, "loss_mask": [1, 0], "rollout_log_probs": [-1.0, 0.0]}
    samples[0].train_metadata = {"turns": [turn, turn]}
    args = run_args(**TRAINING, custom_convert_samples_to_train_data_path=HERE + "convert")
    data = shard(args, samples)
    rows = sorted(zip(data["sample_indices"], data["turn"], data["rewards"], strict=True))
    assert rows == [(0, 0, 0.0), (0, 1, 0.0), (1, 0, 1.0), (2, 0, 0.0), (3, 0, 1.0)]


# Filters and data


def test_filters_of_whole_rollouts(make_args):
    args = make_args(
        rollout_batch_size=2, rollout_sample_filter_path=HERE + "drop_long",
        rollout_all_samples_process_path=HERE + "keep_all",
        rollout_function_path="slime.rollout.sglang_rollout.generate_rollout",
    )  # fmt: skip
    found = list(iter_samples(roll_out(args).samples))
    assert all(sample.remove_sample == (sample.response_length > 3) for sample in found)
    assert third_party.SEEN["all_samples"] == [(2, True)]


def test_a_dynamic_filter_around_slimes_own(make_args):
    args = make_args()
    keep = load_function(HERE + "keep_mixed")
    assert keep(args, group()).keep
    same = group()
    same[1].reward = 0.0
    assert (keep(args, same).keep, keep(args, same).reason) == (False, "zero_std_0.0")
    for sample in same:
        sample.status = Sample.Status.TRUNCATED
    assert keep(args, same).reason == "all_truncated"


def test_a_buffer_filter_that_sorts(make_args):
    args = make_args(buffer_filter_path=HERE + "youngest")
    source = RolloutDataSourceWithBuffer(args)
    source.add_samples([group(index=index) for index in (20, 22, 21)])
    drawn = source.get_samples(4)
    assert [found[0].group_index for found in drawn[:3]] == [22, 21, 20]
    assert len(drawn) == 4


def test_a_curriculum_on_the_built_in_data_source(make_args, tmp_path):
    args = make_args(data_source_path=HERE + "Curriculum", save=str(tmp_path / "save"))
    source = load_function(args.data_source_path)(args)
    first, second = source.get_samples(2), source.get_samples(2)
    assert [found[0].metadata["level"] for found in (*first, *second)] == [0, 0, 1, 1]
    source.save(0)
    args.load = args.save
    again = load_function(args.data_source_path)(args)
    again.load(0)
    assert again.get_metadata()["level"] == 2
    assert again.get_samples(1)[0][0].index == second[-1][-1].index + 1


def test_a_data_source_that_makes_samples_of_its_own_class(make_args):
    args = make_args(
        data_source_path=HERE + "Generated", rollout_batch_size=2,
        rollout_function_path="slime.rollout.sglang_rollout.generate_rollout",
    )  # fmt: skip
    source = load_function(args.data_source_path)(args)
    output = roll_out(args, source)
    for found in output.samples:
        assert [(type(sample), sample.parent) for sample in found] == [(third_party.TreeSample, n) for n in range(2)]
    plain = Sample.from_dict(output.samples[0][1].to_dict())
    assert (plain.parent, plain.response) == (1, output.samples[0][1].response)


# Logging


@pytest.fixture
def make_manager(tmp_path, monkeypatch):
    return manager_maker(tmp_path, monkeypatch)


def logged() -> dict[str, Any]:
    return {record["name"]: record["value"] for record in tracking._tracker.drain()}


def test_a_log_function_in_the_place_of_the_built_in_metrics(make_manager):
    manager = make_manager(custom_rollout_log_function_path=HERE + "log_rollout")
    tracking._tracker.drain()
    manager.generate(0)
    found = logged()
    assert found["rollout/mine/mean"] == 1.0
    assert found["rollout/dropped"] == 3
    assert "rollout/raw_reward" not in found


def test_a_log_function_of_evaluations_besides_the_built_in_metrics(make_manager):
    manager = make_manager(custom_eval_rollout_log_function_path=HERE + "log_eval")
    manager.args.debug_train_only = False
    manager.engines.wait_until_ready = lambda: None
    tracking._tracker.drain()
    manager.eval(0)
    found = logged()
    assert found["eval/held_out/best"] == 1.0
    assert found["eval/held_out"] == 0.5


# The trainer


def test_a_loss_of_the_projects_own():
    batch, logits = make_batch()
    args = loss_args(loss_type="custom_loss", custom_loss_function_path=HERE + "policy_loss")
    loss, report = loss_function(args, batch, 1, logits)
    plain_args = loss_args(use_kl_loss=False)
    built_in, _ = loss_function(plain_args, batch, 1, logits)
    assert report["keys"] == ["loss", "pg_clipfrac"]
    assert loss > built_in  # by the KL term, which is positive
    loss.backward()
    assert logits.grad.abs().sum() > 0
    assert reducer(args, batch)(torch.zeros(8)) == 0


def test_advantages_of_the_projects_own():
    data = {
        "rewards": [1.0, -2.0], "loss_masks": [torch.ones(3), torch.tensor([1, 0])], "response_lengths": [3, 2],
        "total_lengths": [4, 3], "log_probs": [torch.zeros(3), torch.zeros(2)],
        "tokens": [torch.zeros(4), torch.zeros(3)], "sample_indices": [0, 1],
    }  # fmt: skip
    compute_advantages_and_returns(run_args(kl_coef=0, custom_advantage_function_path=HERE + "advantages"), data)
    check_equal(data["advantages"][0], [0.81, 0.9, 1.0])
    check_equal(data["advantages"][1], [-1.8, 0.0])


def test_tokens_are_left_out_after_the_advantages():
    data = {
        "loss_masks": [torch.ones(3)], "response_lengths": [3], "total_lengths": [4], "tokens": [torch.zeros(4)],
        "log_probs": [torch.tensor([0.0, -3.0, 0.0])], "rollout_log_probs": [torch.zeros(3)], "sample_indices": [0],
        "advantages": [torch.ones(3)], "returns": [torch.ones(3)],
    }  # fmt: skip
    hooks = load_trainer_hooks(run_args(rollout_data_postprocess_path=HERE + "postprocess"))
    hooks.postprocess_rollout_data(run_args(), 0, data)
    check_equal(data["loss_masks"][0], [1.0, 0.0, 1.0])


def test_importance_weights_and_a_reducer_of_the_projects_own():
    batch, logits = make_batch()
    plain, _ = loss_function(loss_args(use_tis=True), batch, 1, logits)
    own, report = loss_function(loss_args(use_tis=True, custom_tis_function_path=HERE + "weights"), batch, 1, logits)
    torch.testing.assert_close(own, plain)  # no ratio is that large
    assert "mine" in report["keys"]
    reduced, _ = loss_function(loss_args(custom_pg_loss_reducer_function_path=HERE + "reducer"), batch, 1, logits)
    assert reduced != loss_function(loss_args(), batch, 1, logits)[0]


def test_hooks_of_megatron():
    hooks = load_trainer_hooks(
        run_args(
            custom_megatron_init_path=HERE + "megatron_init",
            custom_megatron_before_log_prob_hook_path=HERE + "before_log_prob",
            custom_megatron_before_train_step_hook_path=HERE + "before_train_step",
            custom_update_weight_post_write_path=HERE + "post_write",
        )
    )
    hooks.after_megatron_init("args")
    hooks.before_log_prob("args", ["model"], "ref_")
    hooks.before_train_step("args", 3, 1, ["model"], "optimizer", "scheduler")
    assert third_party.SEEN == {"init": [("args",)], "log_prob": [("ref_",)], "step": [(3, 1)]}


# Around a run


def test_flags_of_the_projects_own_by_the_older_path():
    from slime.utils.arguments import parse_args

    assert parse("--third-party-depth", 5, add_custom_arguments=third_party.add_arguments).third_party_depth == 5
    assert parse_args is load_function("slime.arguments.parse_args")


def test_a_driver_finds_its_functions():
    from slime.ray.placement_group import create_placement_groups, create_rollout_manager, create_training_models

    assert all(map(callable, (create_placement_groups, create_rollout_manager, create_training_models)))


def test_a_generator_of_the_rollout_buffer(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    generator = third_party.Essays("http://engine/v1", "http://buffer", num_repeat_per_sample=2, num_process=1)

    def write(client: Any, messages: Any, sampling_params: Any) -> Any:
        return [*messages, {"role": "assistant", "content": messages[0]["content"] * 3}]

    generator.entry(str(path), write, lambda item: float(len(item["messages"][-1]["content"])), 1)
    assert sorted((sent["instance_id"], sent["reward"]) for sent in generator.sent) == [
        ("0", 3.0), ("0", 3.0), ("1", 3.0), ("1", 3.0)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("slime.utils.metric_utils", "compute_rollout_step compute_statistics dict_add_prefix has_repetition"),
        ("slime.utils.logging_utils", "configure_logger finish_tracking init_tracking log"),
        ("slime.utils.timer", "timer"),
        ("slime.utils.wandb_utils", "init_wandb_primary init_wandb_secondary"),
        ("slime.utils.trace_utils", "trace_span trace_event trace_function"),
        ("slime.rollout.sglang_example", "generate generate_rollout GenerateState abort"),
        ("slime.rollout.sft_example", "generate_rollout"),
        ("slime.rollout.agent_rollout", "generate_rollout"),
        ("slime.ray.rollout", "RolloutManager"),
        ("slime.ray.actor_group", "RayTrainGroup"),
        ("slime.backends.megatron_utils.actor", "MegatronTrainRayActor"),
        ("slime.backends.megatron_utils.model", "get_model"),
        ("slime.backends.megatron_utils.megatron_to_hf", "convert_to_hf remove_padding"),
        ("slime.backends.megatron_utils.update_weight.update_weight_from_tensor", "UpdateWeightFromTensor"),
        ("slime.backends.sglang_utils.sglang_engine", "SGLangEngine"),
        ("slime.backends.sglang_utils.sglang_config", "SglangConfig ModelConfig ServerGroupConfig"),
    ],
)
def test_older_paths_that_projects_import(module, names):
    with warnings.catch_warnings(action="ignore"):
        found = importlib.import_module(module)
        assert [name for name in names.split() if getattr(found, name, None) is None] == []


def test_every_plugin_is_run():
    text = Path(__file__).read_text(encoding="utf-8")
    own = [
        name for name, value in vars(third_party).items() if getattr(value, "__module__", "") == third_party.__name__
    ]
    assert [name for name in own if not name.startswith("_") and name not in text and name != "note"] == []
