"""The order of the loop's steps, recorded by plain objects that stand for the two sides; the start and end of a run."""

from __future__ import annotations

import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from slime import driver
from slime.arguments.errors import ArgumentError
from slime.driver import Loop
from slime.observability.timer import get_timers
from slime.ray.driver import program
from slime.ray.driver.program import Terminated
from tests.support.arguments import run_args


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

    def check_canary(self, expected):
        self._call(f"canary {expected}")

    def weights_updated(self, version, step):
        self._call(f"version {version} is step {step}")


class TrainerRecorder(Recorder):
    canary: list[float] | None = None

    def async_train(self, rollout_id, data, external_data=None):
        assert data == f"data {rollout_id}"
        return [rollout_id]

    def wait(self, refs, what):
        self._call(f"train {refs[0]}")
        return [{"steps": [{"loss": 0.0}], "rollout": {"rollout/raw_reward": 1.0}}]

    def save_model(self, rollout_id, force_sync=False, keep=True):
        self._call(f"save model {rollout_id}" + (" to the end" if force_sync else "") + ("" if keep else " (passing)"))

    def update_weights(self, synchronous_loop=True):
        self._call("sync" if synchronous_loop else "sync (requests survive)")

    def offload(self):
        self._call("trainer off")

    def onload(self):
        self._call("trainer on")

    def clear_memory(self):
        self._call("clear")

    def release(self):
        self._call("release")

    def restart(self, rollout_id):
        self._call(f"come back for {rollout_id}")

    def finish(self):
        self._call("finish")


def loop_args(**changes):
    args = run_args(num_rollout=2)
    vars(args).update({"device_type": "cpu", **changes})
    return args


def run(*, overlap: bool = False, with_trainer: bool = True, per_epoch: int | None = None, **changes) -> list[str]:
    calls: list[str] = []
    trainer = TrainerRecorder(calls) if with_trainer else None
    Loop(loop_args(**changes), RolloutRecorder(calls), trainer, per_epoch, overlap=overlap).run()
    return calls


@pytest.fixture(autouse=True)
def _fresh_timers():
    get_timers().drain()
    yield
    get_timers().drain()


def test_the_start_is_reported_when_the_engines_have_their_weights():
    calls: list[str] = []
    loop = Loop(loop_args(num_rollout=1), RolloutRecorder(calls), TrainerRecorder(calls), None, overlap=False)
    loop.run(lambda: calls.append("started"))
    assert calls[:3] == ["sync", "started", "start 0"]


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


def test_released_trainers_are_saved_restarted_and_hand_over_the_engines_memory_themselves():
    calls = run(release_train=True, offload_rollout=True, save_interval=100)
    assert calls == (
        ["sync", "engine caches on"]
        + ["start 0", "wait 0", "engines off", "come back for 0", "train 0"]
        + ["save prompts 0", "save model 0 to the end (passing)", "sync", "engine caches on"]
        + ["start 1", "wait 1", "engines off", "come back for 1", "train 1"]
        + ["save prompts 1", "save model 1 to the end", "sync", "engine caches on", "finish"]
    )


def test_released_trainers_stay_between_two_weight_syncs():
    calls = run(overlap=True, num_rollout=4, release_train=True, update_weights_interval=2, save_interval=3)
    saves_and_syncs = [call for call in calls if call.split()[0] in ("save", "sync", "train") and "prompts" not in call]
    assert saves_and_syncs == (
        ["sync (requests survive)", "train 0", "train 1", "save model 1 to the end (passing)"]
        + ["sync (requests survive)", "train 2", "save model 2", "train 3", "save model 3 to the end"]
        + ["sync (requests survive)"]
    )


def test_without_engines_released_trainers_end_after_every_save():
    calls = run(release_train=True, debug_train_only=True, num_rollout=1, save_interval=1)
    assert calls[-6:] == [
        "come back for 0",
        "train 0",
        "save prompts 0",
        "save model 0 to the end",
        "release",
        "finish",
    ]


def test_a_rollout_that_always_generates_is_not_waited_for():
    path = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
    assert run(overlap=True, num_rollout=3, rollout_function_path=path) == (
        ["sync (requests survive)", "start 0"]
        + ["wait 0", "start 1", "train 0", "sync (requests survive)"]
        + ["wait 1", "start 2", "train 1", "sync (requests survive)"]
        + ["wait 2", "train 2", "sync (requests survive)", "finish"]
    )


@pytest.mark.parametrize("overlap", [False, True])
def test_the_rollout_side_learns_which_step_a_version_is(monkeypatch, overlap):
    versions = iter(range(1, 10))
    monkeypatch.setattr(TrainerRecorder, "update_weights", lambda self, synchronous_loop=True: next(versions))
    calls = run(overlap=overlap, num_rollout=9, start_rollout_id=5, update_weights_interval=2 if overlap else 1)
    steps = [5, 6, 8] if overlap else [5, 6, 7, 8, 9]
    assert [c for c in calls if "is step" in c] == [f"version {v} is step {s}" for v, s in enumerate(steps, 1)]


@pytest.mark.parametrize("overlap", [False, True])
def test_weights_in_the_middle_of_a_rollout_are_those_of_the_step_so_far(monkeypatch, overlap):
    """All engines were lost in rollout 1 and are restarted: they get what has been trained when they are waited for."""
    versions = iter(range(1, 10))
    monkeypatch.setattr(TrainerRecorder, "update_weights", lambda self, synchronous_loop=True: next(versions))
    calls: list[str] = []

    class Losing(RolloutRecorder):
        def wait_generate(self, started, rollout_id):
            if rollout_id == 1 and not any("lost" in call for call in calls):
                self._call("lost")
                loop.supply_weights()
            return super().wait_generate(started, rollout_id)

    loop = Loop(loop_args(num_rollout=2), Losing(calls), TrainerRecorder(calls), None, overlap=overlap)
    loop.run()
    reported = [c for c in calls if "is step" in c or "lost" in c]
    assert reported == (
        ["version 1 is step 0"]
        + (["lost", "version 2 is step 1", "version 3 is step 1"] if overlap else
           ["version 2 is step 1", "lost", "version 3 is step 1"])
        + ["version 4 is step 2"]
    )  # fmt: skip


def test_engines_lost_before_anything_was_trained_get_the_weights_of_the_start(monkeypatch):
    monkeypatch.setattr(TrainerRecorder, "update_weights", lambda self, synchronous_loop=True: 1)
    calls: list[str] = []
    Loop(
        loop_args(start_rollout_id=7), RolloutRecorder(calls), TrainerRecorder(calls), None, overlap=False
    ).supply_weights()
    assert calls == ["version 1 is step 7"]
    Loop(loop_args(), RolloutRecorder(calls), None, None, overlap=False).supply_weights()
    assert len(calls) == 1  # no trainer to push


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
    assert run(num_rollout=0, eval_interval=1) == ["sync", "eval 0", "finish"]
    assert run(num_rollout=0) == ["sync", "finish"]


def test_taking_turns_on_the_same_devices():
    assert run(num_rollout=1, offload_train=True, offload_rollout=True) == (
        ["engine weights on", "sync", "engine caches on"]
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
    assert calls == ["start 0", "wait 0", "trainer on", "train 0", "trainer off", "finish"]


def test_training_alone_still_counts_syncs_for_the_old_actor():
    calls = run(debug_train_only=True, keep_old_actor=True, overlap=True, update_weights_interval=2)
    assert [call for call in calls if call.startswith(("train", "sync"))] == [
        "train 0", "train 1", "sync (requests survive)",
    ]  # fmt: skip


def test_proof_of_the_first_sync():
    calls = run(num_rollout=1, check_weight_update_equal=True)
    assert calls[:3] == ["sync", "checksums", "check compare"]
    assert calls.count("check compare") == 1
    assert calls.count("checksums") == 2
    # a resumed trainer is ahead of the checkpoint that engines took their snapshot of
    assert "check compare" not in run(check_weight_update_equal=True, start_rollout_id=1)


@pytest.mark.parametrize("offloads", [False, True])
def test_engines_are_compared_with_the_trainer_once_they_can_generate(offloads):
    calls: list[str] = []
    trainer = TrainerRecorder(calls)
    trainer.canary = [-1.0]
    args = loop_args(num_rollout=1, offload_rollout=offloads)
    Loop(args, RolloutRecorder(calls), trainer, None, overlap=False).run()
    before = ["engine weights on", "sync", "engine caches on"] if offloads else ["sync"]
    assert calls[: calls.index("canary [-1.0]")] == before
    assert calls.count("canary [-1.0]") == 1


def test_resume_continues_and_a_finished_run_does_nothing(caplog):
    assert [c for c in run(num_rollout=5, start_rollout_id=3) if c.startswith("train")] == ["train 3", "train 4"]
    assert run(num_rollout=5, start_rollout_id=5) == ["sync", "finish"]
    assert "nothing to do" in caplog.text
    assert run(num_rollout=5, start_rollout_id=5, overlap=True) == ["sync (requests survive)", "finish"]


def test_the_next_rollout_runs_while_this_one_is_saved():
    calls = run(overlap=True, num_rollout=3, save_interval=1, eval_interval=2)
    assert calls == (
        ["sync (requests survive)", "start 0"]
        + ["wait 0", "start 1", "train 0", "save prompts 0", "save model 0", "wait 1", "sync (requests survive)"]
        + ["wait 1", "start 2", "train 1", "save prompts 1", "save model 1", "wait 2", "sync (requests survive)"]
        + ["eval 1"]
        + ["wait 2", "train 2", "save prompts 2", "save model 2 to the end", "sync (requests survive)"]
        + ["finish"]
    )


def test_one_step_ahead_resumes_where_it_was():
    calls = run(overlap=True, num_rollout=5, start_rollout_id=3)
    assert [c for c in calls if c.startswith(("start", "train"))] == ["start 3", "start 4", "train 3", "train 4"]


def test_one_step_ahead_without_a_trainer_generates_everything_once():
    calls = run(overlap=True, with_trainer=False, num_rollout=3)
    assert calls == ["start 0", "wait 0", "start 1", "wait 1", "start 2", "wait 2"]


def test_saves_at_epoch_ends_do_not_come_twice():
    calls = run(num_rollout=4, save_interval=2, per_epoch=2)
    assert [c for c in calls if c.startswith("save model")] == ["save model 1", "save model 3 to the end"]


def test_without_an_interval_nothing_is_saved_or_evaluated_at_any_epoch_end():
    calls = run(num_rollout=4, per_epoch=2)
    assert not [c for c in calls if c.startswith(("save", "eval"))]


def test_without_a_data_set_there_is_still_what_waits_for_the_next_step():
    calls = run(num_rollout=1, save_interval=1, rollout_global_dataset=False)
    assert [c for c in calls if c.startswith("save")] == ["save prompts 0", "save model 0 to the end"]


def test_evaluations_at_their_interval_and_not_at_the_end():
    calls = run(num_rollout=5, eval_interval=2)
    assert [c for c in calls if c.startswith("eval")] == ["eval 0", "eval 1", "eval 3"]


def test_only_engines_sleep():
    assert run(num_rollout=1, offload_rollout=True) == (
        ["engine weights on", "sync", "engine caches on"]
        + ["start 0", "wait 0", "engines off", "train 0"]
        + ["engine weights on", "sync", "engine caches on", "finish"]
    )


def test_only_trainers_sleep():
    assert run(num_rollout=1, offload_train=True) == (
        ["sync", "start 0", "wait 0", "trainer on", "train 0", "trainer off", "sync", "finish"]
    )


def test_engines_that_share_devices_evaluate_with_their_memory_back():
    calls = run(num_rollout=2, offload_train=True, offload_rollout=True, eval_interval=1)
    awake = False
    for call in calls:
        awake = {"engines off": False, "engine caches on": True}.get(call, awake)
        assert awake or not call.startswith(("eval", "start"))
    assert calls.count("eval 1") == 1


def test_a_failing_step_ends_the_loop_at_once():
    class Failing(TrainerRecorder):
        def wait(self, refs, what):
            raise ValueError(what)

    calls: list[str] = []
    loop = Loop(loop_args(save_interval=1), RolloutRecorder(calls), Failing(calls), None, overlap=False)
    with pytest.raises(ValueError, match="training on rollout 0"):
        loop.run()
    assert calls == ["sync", "start 0", "wait 0"]  # nothing is saved of a rollout that was not trained


def test_each_rollout_reports_the_seconds_of_its_stages(monkeypatch):
    logged = []
    monkeypatch.setattr(driver, "log", lambda args, metrics, key: logged.append((metrics, key)))
    run(num_rollout=2, save_interval=2)
    assert [(metrics["rollout/step"], key) for metrics, key in logged] == [(0, "rollout/step"), (1, "rollout/step")]
    assert set(logged[0][0]) - {"rollout/step"} == {
        f"perf/stage/{stage}_time" for stage in ("generate", "train", "sync_weights")
    }
    assert "perf/stage/save_time" in logged[1][0]


# From the start of everything to its end


class World:
    """Stands for everything that ``train`` starts; ``fails`` names the step that raises ``error``."""

    def __init__(self, monkeypatch, fails: str | None = None, error: BaseException | None = None) -> None:
        self.calls: list[str] = []
        self.fails, self.error = fails, error
        monkeypatch.setattr(driver.run_dir, "prepare", self.step("run directory"))
        monkeypatch.setattr(driver, "create_placement_groups", self.step("slots", {"rollout": "slots"}))
        monkeypatch.setattr(driver, "handle_sigterm", self.step("handle SIGTERM"))
        monkeypatch.setattr(driver, "init_tracking", self.step("open trackers"))
        monkeypatch.setattr(driver, "launch_training_models", self.step("trainers' processes", (None, None)))
        monkeypatch.setattr(driver, "create_rollout_manager", self.step("manager", ("manager", None)))
        monkeypatch.setattr(driver, "create_training_models", self.step("trainers", (None, None)))
        monkeypatch.setattr(driver, "RolloutHandle", lambda args, manager: self)
        monkeypatch.setattr(driver.Loop, "run", self.step("loop"))
        monkeypatch.setattr(driver, "finish_tracking", self.step("close trackers"))
        monkeypatch.setattr(driver.cluster, "is_connected", lambda: "slots" in self.calls)
        monkeypatch.setattr(driver.cluster, "current", lambda: SimpleNamespace(shutdown=self.step("shut down")))

    def step(self, name: str, result=None):
        def take(*_, **__):
            self.calls.append(name)
            if name == self.fails:
                raise self.error
            return result

        return take

    def __getattr__(self, name: str):  # the rollout handle: wait_ready, dispose
        return self.step(name)


def train_args(**changes):
    base = {"run_dir": "nowhere", "hf_checkpoint": "/models/mine", "skip_first_look": True}
    return run_args(**{**base, **changes})


START = [
    *("run directory", "slots", "handle SIGTERM", "open trackers"),
    *("trainers' processes", "manager", "trainers", "wait_ready", "loop"),
]


def test_a_run_from_start_to_end(monkeypatch):
    world = World(monkeypatch)
    driver.train(train_args())
    assert world.calls == [*START, "dispose", "close trackers", "shut down"]


def test_trainers_wait_for_the_number_of_rollouts(monkeypatch):
    world = World(monkeypatch)
    driver.train(train_args(num_rollout=None, num_epoch=1))
    assert "trainers' processes" not in world.calls


def test_the_driver_and_the_manager_start_without_torch():
    heavy = "[name for name in ('torch', 'transformers') if name in sys.modules]"
    code = f"import sys, slime.driver, slime.ray.manager.rollout_manager; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("error", [RuntimeError("bad"), KeyboardInterrupt(), Terminated()])
@pytest.mark.parametrize("fails", START[1:])
def test_whatever_fails_everything_is_ended(monkeypatch, fails, error):
    world = World(monkeypatch, fails, error)
    with pytest.raises(type(error)) as raised:
        driver.train(train_args())
    assert raised.value is error
    # Nothing waits for a polite end of what may hang.
    assert world.calls == [*START[: START.index(fails) + 1], "close trackers", "shut down"]


@pytest.mark.parametrize("fails", ["dispose", "close trackers"])
def test_an_interrupted_end_is_an_end_all_the_same(monkeypatch, fails):
    world = World(monkeypatch, fails, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        driver.train(train_args())
    assert world.calls[-3:] == ["dispose", "close trackers", "shut down"]


def test_nothing_was_connected_nothing_is_shut_down(monkeypatch):
    world = World(monkeypatch, "slots", ConnectionError("no route"))
    monkeypatch.setattr(driver.cluster, "is_connected", lambda: False)
    with pytest.raises(ConnectionError):
        driver.train(train_args())
    assert world.calls == ["run directory", "slots", "close trackers"]


@pytest.mark.parametrize("name", ["colocate", "offload_train", "offload_rollout"])
def test_the_overlapped_loop_cannot_take_turns(monkeypatch, name, capsys):
    world = World(monkeypatch)
    monkeypatch.setattr(program, "configure_logger", lambda prefix: None)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert driver.run(train_args(**{name: True}), overlap=True) == 2
    finally:
        signal.signal(signal.SIGTERM, before)
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert f"--{name.replace('_', '-')}" in said
    assert "train.py" in said
    assert world.calls == []  # before Ray, and before a run directory


def test_an_interval_between_syncs_is_for_the_overlapped_loop(monkeypatch):
    world = World(monkeypatch)
    with pytest.raises(ArgumentError, match="--update-weights-interval 2 has no effect"):
        driver.train(train_args(update_weights_interval=2))
    assert world.calls == []


def test_the_loop_learns_how_it_runs(monkeypatch):
    seen = []
    for overlap in (False, True):
        World(monkeypatch)
        monkeypatch.setattr(driver, "create_rollout_manager", lambda args, pg: ("manager", 7))
        monkeypatch.setattr(driver.Loop, "run", lambda self, _: seen.append((self.overlap, self.rollouts_per_epoch)))
        args = train_args()
        driver.train(args, overlap=overlap)
        assert args.generates_while_training == overlap  # before the trainers start, which have threads accordingly
    assert seen == [(False, 7), (True, 7)]
