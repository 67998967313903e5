"""The order of the loop's steps with a critic, and its part of one step, recorded by plain objects."""

from __future__ import annotations

import pytest

from slime.arguments.errors import ArgumentError
from slime.arguments.rules.loop import refuse_impossible_loop
from slime.driver import Loop
from slime.observability.timer import get_timers
from tests.unit.test_driver import RolloutRecorder, TrainerRecorder, loop_args


class CriticRecorder(TrainerRecorder):
    def async_train(self, rollout_id, data, external_data=None):
        assert (data, external_data) == (f"data {rollout_id}", None)
        return [f"values {rollout_id}"]

    def _call(self, text):
        self.calls.append(f"critic {text}".replace("critic trainer", "critic"))

    def finish_saving(self):
        self._call("finish saving")

    def measured(self, name):
        return {"train/critic-value_loss": 0.5}.get(name)


class ActorRecorder(TrainerRecorder):
    """Refuses values that are not the critic's of this rollout, and to be onloaded or offloaded twice."""

    awake = False  # as ``create_training_models`` returns it

    def async_train(self, rollout_id, data, external_data=None):
        assert external_data == [f"values {rollout_id}"]
        assert self.awake
        return [rollout_id]

    def offload(self):
        assert self.awake
        self.awake = False
        super().offload()

    def onload(self):
        assert not self.awake
        self.awake = True
        super().onload()


@pytest.fixture(autouse=True)
def _fresh_timers():
    get_timers().drain()
    yield
    get_timers().drain()


def run(*, overlap: bool = False, **changes) -> list[str]:
    calls: list[str] = []
    settings = {"use_critic": True, "offload_train": True, "num_critic_only_steps": 0, "async_save": False, **changes}
    loop = Loop(
        loop_args(**settings),
        RolloutRecorder(calls),
        ActorRecorder(calls),
        None,
        overlap=overlap,
        critic=CriticRecorder(calls),
    )
    loop.run()
    return calls


CRITIC_0 = ["critic on", "critic train values 0", "critic off"]


def test_critic_and_actor_are_awake_in_turns():
    assert run(num_rollout=1) == (
        ["sync", "start 0", "wait 0"]
        + CRITIC_0
        + ["trainer on", "train 0", "trainer off", "sync", "critic finish", "finish"]
    )


def test_colocated_engines_are_off_before_the_critic_is_on():
    assert run(num_rollout=1, offload_rollout=True) == (
        ["engine weights on", "sync", "engine caches on", "start 0", "wait 0", "engines off"]
        + CRITIC_0
        + ["trainer on", "train 0", "trainer off", "engine weights on", "sync", "engine caches on"]
        + ["critic finish", "finish"]
    )


@pytest.mark.parametrize("overlap", [False, True])
def test_the_actor_waits_for_the_critic_to_have_learned(overlap):
    calls = run(num_rollout=3, num_critic_only_steps=2, overlap=overlap)
    trained = [c for c in calls if "train " in c]
    assert trained == ["critic train values 0", "critic train values 1", "critic train values 2", "train 2"]
    assert len([c for c in calls if c.startswith("sync")]) == 4  # unchanged weights go to the engines all the same
    assert calls.count("trainer on") == 1


def test_the_checkpoint_that_counts_comes_last():
    calls = run(num_rollout=3, num_critic_only_steps=1, save_interval=1)
    assert [c for c in calls if "save" in c or "train " in c] == (
        ["critic train values 0", "save prompts 0", "critic save model 0"]
        + ["critic train values 1", "critic save model 1", "train 1", "save prompts 1", "save model 1"]
        + ["critic train values 2", "critic save model 2 to the end", "train 2", "save prompts 2"]
        + ["save model 2 to the end"]
    )


def test_a_checkpoint_in_the_background_is_whole_before_the_actors():
    calls = run(num_rollout=3, save_interval=1, async_save=True)
    for rollout in range(2):  # the actor publishes a checkpoint when it trains on the next rollout
        finish = calls.index("critic finish saving", calls.index(f"save model {rollout}"))
        assert calls.index(f"critic save model {rollout}") < finish < calls.index(f"train {rollout + 1}")
    assert calls.count("critic finish") == 1  # profiles and records of memory end there


def test_in_the_overlapped_loop_the_actor_sleeps_while_the_critic_trains():
    calls = run(num_rollout=2, overlap=True)
    assert [c for c in calls if "trainer" in c or c.startswith(("critic", "train"))] == (
        [*CRITIC_0, "trainer on", "train 0", "trainer off"]
        + [c.replace("0", "1") for c in CRITIC_0]
        + ["trainer on", "train 1", "trainer off", "critic finish"]
    )


def test_the_line_of_a_rollout_says_how_the_critic_does(caplog):
    caplog.set_level("INFO")
    run(num_rollout=1, num_critic_only_steps=1)
    assert "value loss 0.5" in caplog.text


def test_turns_of_the_trainers_are_no_turns_with_engines():
    settings = {"use_critic": True, "offload_train": True, "colocate": False, "max_staleness": None}
    refuse_impossible_loop(loop_args(**settings), overlap=True)
    with pytest.raises(ArgumentError, match="--colocate makes engines and trainers take turns"):
        refuse_impossible_loop(loop_args(**settings | {"colocate": True}), overlap=True)
