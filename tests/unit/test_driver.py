"""The order of the loop's steps, recorded by plain objects that stand for the two sides."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from slime.driver import Loop
from slime.observability.timer import get_timers


class Recorder:
    """Stands for the rollout side and for the trainers; writes down every call."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def _call(self, text: str) -> None:
        self.calls.append(text)


class RolloutRecorder(Recorder):
    def start_generate(self, rollout_id):
        self._call(f"start {rollout_id}")
        return f"running {rollout_id}"

    def wait_generate(self, started, rollout_id):
        assert started == f"running {rollout_id}"
        self._call(f"wait {rollout_id}")
        return f"data {rollout_id}"

    def eval(self, rollout_id):
        self._call(f"eval {rollout_id}")

    def save(self, rollout_id):
        self._call(f"save prompts {rollout_id}")

    def offload(self):
        self._call("engines off")

    def onload_weights(self):
        self._call("engine weights on")

    def onload_kv(self):
        self._call("engine caches on")

    def check_weights(self, action):
        self._call(f"check {action}")

    def check_equal_checksums(self):
        self._call("checksums")


class TrainerRecorder(Recorder):
    def async_train(self, rollout_id, data, external_data=None):
        assert data == f"data {rollout_id}"
        return [rollout_id]

    def wait(self, refs, what):
        self._call(f"train {refs[0]}")
        return [{"steps": [{"loss": 0.0}], "rollout": {"rollout/raw_reward": 1.0}}]

    def save_model(self, rollout_id, force_sync=False):
        self._call(f"save model {rollout_id}" + (" to the end" if force_sync else ""))

    def update_weights(self, synchronous_loop=True):
        self._call("sync" if synchronous_loop else "sync (requests survive)")

    def offload(self):
        self._call("trainer off")

    def onload(self):
        self._call("trainer on")

    def clear_memory(self):
        self._call("clear")

    def finish(self):
        self._call("finish")


def run(*, overlap: bool = False, with_trainer: bool = True, per_epoch: int | None = None, **changes) -> list[str]:
    base = {
        "num_rollout": 2,
        "start_rollout_id": 0,
        "skip_eval_before_train": False,
        "eval_interval": None,
        "save_interval": None,
        "update_weights_interval": 1,
        "debug_train_only": False,
        "offload_train": False,
        "offload_rollout": False,
        "check_weight_update_equal": False,
        "rollout_global_dataset": True,
        "device_type": "cpu",
        "wandb_always_use_train_step": False,
    }
    calls: list[str] = []
    trainer = TrainerRecorder(calls) if with_trainer else None
    Loop(SimpleNamespace(**{**base, **changes}), RolloutRecorder(calls), trainer, per_epoch, overlap=overlap).run()
    return calls


@pytest.fixture(autouse=True)
def _fresh_timers():
    get_timers().drain()
    yield
    get_timers().drain()


def test_one_after_the_other():
    assert run() == ["sync"] + ["start 0", "wait 0", "train 0", "sync"] + ["start 1", "wait 1", "train 1", "sync"] + [
        "finish"
    ]


def test_one_step_ahead():
    assert run(overlap=True, num_rollout=3) == (
        ["sync (requests survive)", "start 0"]
        + ["wait 0", "start 1", "train 0", "wait 1", "sync (requests survive)"]
        + ["wait 1", "start 2", "train 1", "wait 2", "sync (requests survive)"]
        + ["wait 2", "train 2", "sync (requests survive)", "finish"]
    )


def test_one_step_ahead_syncs_every_few_rollouts():
    calls = run(overlap=True, num_rollout=4, update_weights_interval=2)
    assert [c for c in calls if "sync" in c or "train" in c] == (
        ["sync (requests survive)", "train 0", "train 1", "sync (requests survive)"]
        + ["train 2", "train 3", "sync (requests survive)"]
    )


def test_prompts_are_saved_before_the_checkpoint_that_makes_them_count():
    calls = run(num_rollout=3, save_interval=2)
    saves = [c for c in calls if c.startswith(("save", "train", "sync"))]
    assert saves == (
        ["sync", "train 0", "sync"]
        + ["train 1", "save prompts 1", "save model 1", "sync"]
        + ["train 2", "save prompts 2", "save model 2 to the end", "sync"]
    )


def test_saves_and_evaluations_at_epoch_ends():
    calls = run(num_rollout=6, save_interval=4, eval_interval=4, per_epoch=3, skip_eval_before_train=True)
    assert [c for c in calls if c.startswith("save model")] == [
        "save model 2",
        "save model 3",
        "save model 5 to the end",
    ]
    assert [c for c in calls if c.startswith("eval")] == ["eval 2", "eval 3", "eval 5"]


def test_evaluation_before_training_only_at_the_very_start():
    assert run(eval_interval=5)[:3] == ["sync", "eval 0", "start 0"]
    assert "eval 0" not in run(eval_interval=5, skip_eval_before_train=True)
    assert "eval 0" not in run(eval_interval=5, start_rollout_id=1)
    assert "eval 0" not in run(eval_interval=5, overlap=True)
    # after the sync of its rollout, so that it evaluates what has been trained
    calls = run(eval_interval=1, num_rollout=1)
    assert calls[-3:] == ["sync", "eval 0", "finish"]


def test_only_evaluation():
    assert run(num_rollout=0, eval_interval=1) == ["sync", "eval 0"]
    assert run(num_rollout=0) == ["sync"]


def test_taking_turns_on_the_same_devices():
    assert run(num_rollout=1, offload_train=True, offload_rollout=True) == (
        ["trainer off", "engine weights on", "sync", "engine caches on"]
        + ["start 0", "wait 0", "engines off", "trainer on", "train 0"]
        + ["trainer off", "engine weights on", "sync", "engine caches on", "finish"]
    )


def test_checkpoints_are_saved_while_the_trainer_is_awake():
    calls = run(num_rollout=1, offload_train=True, offload_rollout=True, save_interval=1)
    assert calls.index("save model 0 to the end") < len(calls) - 1 - calls[::-1].index("trainer off")


def test_memory_is_cleared_on_gpus():
    assert "clear" in run(device_type="cuda")
    assert "clear" not in run(device_type="cuda", offload_train=True)


def test_generation_alone():
    assert run(with_trainer=False) == ["start 0", "wait 0", "start 1", "wait 1"]


def test_training_alone_has_no_engines_to_sync():
    calls = run(debug_train_only=True, offload_train=True, offload_rollout=True, num_rollout=1)
    assert calls == ["trainer off", "start 0", "wait 0", "trainer on", "train 0", "trainer off", "finish"]


def test_proof_of_the_first_sync():
    calls = run(num_rollout=1, check_weight_update_equal=True)
    assert calls[:3] == ["sync", "checksums", "check compare"]
    assert calls.count("check compare") == 1
    assert calls.count("checksums") == 2
    # a resumed trainer is ahead of the checkpoint that engines took their snapshot of
    assert "check compare" not in run(check_weight_update_equal=True, start_rollout_id=1)


def test_resume_continues_and_a_finished_run_does_nothing(caplog):
    assert [c for c in run(num_rollout=5, start_rollout_id=3) if c.startswith("train")] == ["train 3", "train 4"]
    assert run(num_rollout=5, start_rollout_id=5) == ["sync", "finish"]
    assert "nothing to do" in caplog.text
    assert run(num_rollout=5, start_rollout_id=5, overlap=True) == ["sync (requests survive)", "finish"]
