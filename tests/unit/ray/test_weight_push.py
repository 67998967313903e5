"""The order of a weight push: who is called when, and what becomes of engines that fail in the middle."""

from __future__ import annotations

from typing import Any

import pytest

from slime.ray.driver.weight_push import WeightPush
from slime.ray.remote import RemoteFailure
from slime.servers.types import EngineInfo
from tests.support.arguments import run_args

E0, E1, E2 = (EngineInfo(f"http://e{rank}", rank=rank) for rank in range(3))


class Trainers:
    """Trainers and a manager that note what they are called for; ``failures`` of a method are raised in turn."""

    def __init__(self, *lists: list[EngineInfo], **flags: Any) -> None:
        self.args = run_args(weight_sync_timeout=10.0, update_weight_disk_keep_files=True, **flags)
        self.engines = list(lists)
        self.failures: dict[str, list[Exception]] = {}
        self.calls: list[tuple[Any, ...]] = []
        self.deadlines: dict[str, float | None] = {}
        self.step = 4

    def call_ranks(self, method: str, what: str, deadline_s: float, *args: Any) -> list[Any]:
        self.note(method, deadline_s, *args)
        return [f"/shared/{args[0]}" if method == "publish_weights" else 5] * 2

    def call_manager(self, method: str, what: str, *args: Any, deadline_s: float | None = None) -> Any:
        self.note(method, deadline_s, *args)
        if method == "get_updatable_engines":
            return self.engines.pop(0) if len(self.engines) > 1 else self.engines[0]
        return None

    def note(self, method: str, deadline_s: float | None, *args: Any) -> None:
        self.calls.append((method, *args))
        self.deadlines[method] = deadline_s
        if self.failures.get(method):
            raise self.failures[method].pop(0)

    def step_of_weights(self) -> int | None:
        return self.step

    def release(self) -> None:
        self.calls.append(("release",))


def disk(*lists: list[EngineInfo], **flags: Any) -> Trainers:
    return Trainers(*lists, update_weight_transport="disk", **flags)


def test_an_engine_that_dies_in_a_push_is_dropped_and_the_push_repeated(caplog: Any) -> None:
    trainers = Trainers([E0, E1, E2], [E0, E2])
    trainers.failures["update_weights"] = [RemoteFailure("WeightSyncError: http://e1 did not pause")]
    assert WeightPush(trainers.args, trainers).run(True, new_weights=True) == 5
    assert trainers.calls == [
        ("recover_updatable_engines",),
        ("get_updatable_engines",),
        ("update_weights", [E0, E1, E2], True),
        ("mark_unreachable_engines_dead", {}),
        ("get_updatable_engines",),
        ("recover_updatable_engines",),
        ("get_updatable_engines",),
        ("update_weights", [E0, E2], True),
        ("weights_updated", 5, 4),
        ("clear_updatable_num_new_engines", 5),
    ]
    assert trainers.deadlines["update_weights"] == 40.0
    assert "retrying the weight push without engine 1: WeightSyncError: http://e1 did not pause" in caplog.text


def test_the_engine_that_hangs_is_named_by_the_data_of_the_error() -> None:
    """Names of other engines in the message do not matter."""
    trainers = Trainers([E0, E1], [E0])
    message = "Weight sync could not pause on 1 of 2 engines:\n  http://e0: no answer within 10 s"
    hanging = {"http://e1": "could not flush the prefix cache"}
    trainers.failures["update_weights"] = [RemoteFailure(message, data={"hanging": hanging})]
    WeightPush(trainers.args, trainers).run(False, new_weights=True)
    assert ("mark_unreachable_engines_dead", hanging) in trainers.calls


@pytest.mark.parametrize("failure", [RemoteFailure("ValueError: no such weight"), TimeoutError("pushing weights")])
def test_what_no_engine_is_to_blame_for_ends_the_push(failure: Exception) -> None:
    trainers = Trainers([E0, E1])
    trainers.failures["update_weights"] = [failure]
    with pytest.raises(type(failure)):
        WeightPush(trainers.args, trainers).run(True, new_weights=True)
    assert trainers.calls[-1][0] != "clear_updatable_num_new_engines"


def test_without_engines_nothing_is_sent() -> None:
    trainers = Trainers([])
    assert WeightPush(trainers.args, trainers).run(True, new_weights=True) is None
    assert trainers.calls == [("recover_updatable_engines",), ("get_updatable_engines",)]


@pytest.mark.parametrize(
    ("data", "whole"), [({"needs_full_version": True}, True), ({}, False)], ids=["changes", "something else"]
)
def test_a_host_that_changes_do_not_reach_gets_all_weights(data: Any, whole: bool) -> None:
    trainers = disk([E0], update_weight_mode="delta", update_weight_local_checkpoint_dir="/local")
    push = WeightPush(trainers.args, trainers)
    assert push.run(True, new_weights=True) == 1
    trainers.calls.clear()
    trainers.failures["load_weights"] = [RemoteFailure("NoWayError: no way from a whole version", data=data)]
    if not whole:
        with pytest.raises(RemoteFailure, match="no way"):
            push.run(True, new_weights=True)
        return
    assert push.run(True, new_weights=True) == 3
    assert [call for call in trainers.calls if call[0] in ("publish_weights", "load_weights")] == [
        ("publish_weights", 2, [E0], 1),  # what changed since version 1
        ("load_weights", "/shared/2", 2, True),
        ("publish_weights", 3, [E0], None),
        ("load_weights", "/shared/3", 3, True),
    ]
    assert trainers.deadlines["load_weights"] == 60.0
    assert trainers.calls[-2:] == [("weights_synced", True), ("clear_updatable_num_new_engines", 3)]


def test_engines_that_are_left_read_the_files_that_were_written_for_all() -> None:
    trainers = disk([E0, E1], [E0])
    trainers.failures["load_weights"] = [RemoteFailure("WeightSyncError: http://e1 is gone")]
    assert WeightPush(trainers.args, trainers).run(True, new_weights=True) == 1
    assert [call[0] for call in trainers.calls].count("publish_weights") == 1
    assert trainers.calls.count(("load_weights", "/shared/1", 1, True)) == 2


@pytest.mark.parametrize("offload", [False, True])
def test_trainers_make_room_between_writing_and_loading(offload: bool) -> None:
    trainers = disk([E0], release_train=True, offload_rollout=offload)
    push = WeightPush(trainers.args, trainers)
    asked = ("recover_updatable_engines", "get_updatable_engines")
    push.run(True, new_weights=True)
    room = ["release", "onload_weights"] if offload else ["release"]
    end = ["load_weights", "weights_synced", "weights_updated", "clear_updatable_num_new_engines"]
    assert [call[0] for call in trainers.calls if call[0] not in asked] == ["publish_weights", *room, *end]
    trainers.calls.clear()
    push.run(True, new_weights=False)  # an engine was restarted after the trainers had ended
    end.remove("weights_updated")  # they are the same as before
    assert [call[0] for call in trainers.calls if call[0] not in asked] == end
