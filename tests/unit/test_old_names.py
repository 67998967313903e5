"""Adapters of older names do the work of the new ones, with a warning that names them."""

from __future__ import annotations

import math
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

from slime.compat import named_updaters, old_calls, update_weight_utils
from slime.observability import tensorboard_utils, timer, tracking
from slime.rollout import sample_hooks
from slime.utils import data, ppo_utils, wandb_utils
from slime.utils.misc import Box, SingletonMeta
from slime.utils.types import Sample
from tests.support.arguments import run_args


def test_log_probs_of_tokens():
    logits = torch.tensor([[0.0, math.log(3.0)], [math.log(4.0), 0.0]])
    with pytest.warns(DeprecationWarning, match="calculate_log_probs_and_entropy"):
        found = ppo_utils.compute_log_probs(logits, torch.tensor([1, 1]), None)
    assert found.shape == (2, 1)
    assert torch.allclose(found[:, 0].exp(), torch.tensor([3 / 4, 1 / 5]))


def test_wandb_is_one_of_the_trackers(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "_tracker", tracking.Tracker())
    at_exit = []
    monkeypatch.setattr(old_calls.atexit, "register", at_exit.append)
    args = run_args(run_dir=str(tmp_path))
    with pytest.warns(DeprecationWarning, match=r"init_tracking\(args, primary=False\)"):
        wandb_utils.init_wandb_secondary(args, "run id", router_addr="http://x")
    assert not tracking.get_tracker().is_primary
    with pytest.warns(DeprecationWarning, match="init_tracking"):
        assert wandb_utils.init_wandb_primary(args) is None
    assert tracking.get_tracker().is_primary
    (finish,) = at_exit
    finish()
    assert not tracking.get_tracker().is_primary
    assert (tmp_path / "metrics.jsonl").exists()


def test_parameters_under_their_global_names():
    layers = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False)])
    layers[0].layer_number = 3  # the third of the model, the first of this pipeline stage
    decoder = torch.nn.Module()
    decoder.layers = layers
    model = torch.nn.Module()
    model.decoder = decoder
    with pytest.warns(DeprecationWarning, match="global_named_parameters"):
        found = list(update_weight_utils.named_parameters(Namespace(), [model]))
    assert [name for name, _ in found] == ["module.module.decoder.layers.2.weight"]
    assert found[0][1] is layers[0].weight


@pytest.mark.parametrize("name", ["UpdateWeightFromTensor", "UpdateWeightFromDistributed"])
def test_updaters_by_name_push_through_their_transport(monkeypatch, name):
    made = []
    transport = name.removeprefix("UpdateWeightFrom") + "Transport"
    monkeypatch.setattr(named_updaters, transport, lambda args: made.append(args) or "transport")
    args = Namespace(weight_sync_pause_mode="auto", update_weight_start_version=4)
    with pytest.warns(DeprecationWarning, match=f"named_updaters.{name}"):
        cls = getattr(update_weight_utils, name)
    updater = cls(args, ["chunk"], dict, model_name="qwen3", quantization_config=None)
    assert made == [args]
    assert (updater.transport, updater.pause_mode, updater.version) == ("transport", "abort", 4)
    assert (updater.trainer.model, updater.trainer.args) == (["chunk"], args)
    calls = []
    monkeypatch.setattr(updater, "connect", lambda engines: calls.append(("connect", engines)))
    monkeypatch.setattr(updater, "update", lambda: calls.append("update"))
    updater.connect_rollout_engines(["engine"], "lock")
    updater.update_weights()
    assert calls == [("connect", ["engine"]), "update"]


def test_functions_are_timed_under_their_name(monkeypatch):
    monkeypatch.setattr(timer, "_timers", timer.Timers())
    clock = iter([1.0, 3.5, 10.0, 11.0, 20.0, 24.0])
    monkeypatch.setattr(timer.time, "monotonic", lambda: next(clock))

    @timer.timer
    def save_model(x):
        return x + 1

    @timer.timer("other")
    def work():
        return "done"

    assert (save_model(1), work()) == (2, "done")
    with timer.timer("block"):
        pass
    assert timer.drain_metrics() == {
        "perf/save_model_time": 2.5, "perf/other_time": 1.0, "perf/block_time": 4.0,
    }  # fmt: skip


def test_curves_of_a_plug_in(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path))
    SingletonMeta.clear_instances()
    with pytest.raises(ValueError, match="--use-tensorboard"):
        tensorboard_utils._TensorboardAdapter(Namespace(use_tensorboard=False))
    adapter = tensorboard_utils._TensorboardAdapter(Namespace(use_tensorboard=True))
    assert tensorboard_utils._TensorboardAdapter(Namespace(use_tensorboard=True)) is adapter
    adapter.log({"mine/a": 1.5, "text": "skipped"}, 3)
    adapter.log({"mine/a": 2}, step=4)
    adapter.finish()
    SingletonMeta.clear_instances()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("mine/a")] == [(3, 1.5), (4, 2.0)]


async def test_hooks_learn_which_rollout_is_in_progress(monkeypatch):
    seen = []

    def hook(args, sample, *, rollout_id=None, evaluation=False):
        seen.append((sample.index, rollout_id, evaluation))

    monkeypatch.setattr(sample_hooks, "load_function", lambda *a: hook)
    monkeypatch.setattr(sample_hooks, "_current_rollout_id", None)
    args = SimpleNamespace(rollout_sample_hook_path=["my.hook"])
    samples = [Sample(index=0), [Sample(index=1)]]
    assert await sample_hooks.apply_rollout_sample_hooks(args, samples) == samples
    sample_hooks.set_current_rollout_id(7)
    await sample_hooks.apply_rollout_sample_hooks(args, samples[0], evaluation=True)
    await sample_hooks.apply_rollout_sample_hooks(args, samples[0], rollout_id=9)
    assert seen == [(0, None, False), (1, None, False), (0, 7, True), (0, 9, False)]


def test_the_shard_of_a_rank(monkeypatch):
    import ray

    class Shard:
        def __init__(self, rank):
            self.rank = rank

        def to_rollout_data(self):
            return {"partition": [self.rank]}

    monkeypatch.setattr(ray, "get", lambda ref: ref)
    boxes = [Box(Shard(rank)) for rank in range(2)]
    assert data.process_rollout_data(None, boxes, 1, 2) == {"partition": [1]}
    with pytest.raises(ValueError, match="shards for 2 data-parallel ranks, expected 4"):
        data.process_rollout_data(None, boxes, 1, 4)
