"""Trajectories become groups: each once, none lost, whatever order they come in."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from slime_plugins.rollout_buffer.group_queue import BufferFull, GroupFunctions, GroupQueue, ItemError


def item(uid: Any, instance_id: Any = "a", reward: Any = 1.0, **extra: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}]
    return {"uid": uid, "instance_id": instance_id, "messages": messages, "reward": reward, "extra_info": extra}


def uids(items: list[dict[str, Any]]) -> list[str]:
    return [one["uid"] for one in items]


def test_a_group_is_handed_out_when_it_is_full():
    queue = GroupQueue(2, "math")
    for uid, instance in (("1", "a"), ("2", "b"), ("3", 7)):
        queue.write(item(uid, instance))
    assert queue.read()[0] == []
    queue.write(item("4", "b", reward=0.0))
    data, meta = queue.read()
    assert uids(data) == ["2", "4"]
    assert (meta["finished_groups"], meta["num_groups"], meta["total_samples"], meta["avg_reward"]) == (
        ["b"],
        1,
        2,
        0.5,
    )
    assert (meta["unfinished_groups"], meta["unfinished_items"]) == (2, 2)
    queue.write(item("5", "7"))
    assert uids(queue.read()[0]) == ["3", "5"]
    assert queue.read()[0] == []


def test_a_trajectory_that_is_written_again_is_held_once():
    queue = GroupQueue(2, "math")
    for uid in ("1", "1", "2", "2", "1"):
        queue.write(item(uid))
    data, meta = queue.read()
    assert (uids(data), meta["written"], meta["written_again"]) == (["1", "2"], 2, 3)


def test_a_batch_that_did_not_arrive_is_handed_out_again():
    queue = GroupQueue(1, "math")
    queue.write(item("1"))
    data, meta = queue.read(None, acknowledges=True)
    queue.write(item("2"))
    assert queue.has_data(None, acknowledges=True)
    again, meta_again = queue.read(None, acknowledges=True)
    assert (uids(data), uids(again), meta_again["handed_out_again"]) == (["1"], ["1"], True)
    assert meta["batch_id"] == meta_again["batch_id"]
    assert queue.held == 2
    following, meta = queue.read(meta["batch_id"], acknowledges=True)
    assert uids(following) == ["2"]
    assert queue.read(meta["batch_id"], acknowledges=True)[0] == []
    assert not queue.has_data(meta["batch_id"], acknowledges=True)
    assert queue.held == 0


def test_no_more_is_taken_than_fits():
    queue = GroupQueue(1, "math", max_items=2)
    for uid in ("1", "2"):
        queue.write(item(uid))
    with pytest.raises(BufferFull, match="2 trajectories wait to be fetched, at most 2"):
        queue.write(item("3"))
    assert len(queue.read()[0]) == 2
    queue.write(item("3"))
    assert uids(queue.read()[0]) == ["3"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([], "expected an object"),
        ({"uid": "1"}, "missing: instance_id, messages, reward, extra_info"),
        (item(3), "uid must be a string"),
        (item(""), "uid must be a string"),
        (item("1", ["a"]), "instance_id must be"),
        ({**item("1"), "messages": []}, "messages must be a list"),
        ({**item("1"), "messages": [{"content": "x"}]}, "with a role"),
        ({**item("1"), "extra_info": None}, "extra_info must be an object"),
    ],
)
def test_what_is_no_trajectory_is_refused(wrong, message):
    queue = GroupQueue(1, "math")
    with pytest.raises(ItemError, match=message):
        queue.write(wrong)
    assert queue.held == 0


def test_the_functions_of_a_generator():
    """Groups of two or more good items are finished at three; a group is handed out in reverse."""

    def is_valid_group(group, min_valid_group_size, task_type):
        assert (min_valid_group_size, task_type) == (3, "kernel")
        good = sum(one["reward"] > 0 for one in group[1])
        return good >= 2, len(group[1]) >= 3

    module = SimpleNamespace(
        is_valid_group=is_valid_group,
        transform_group=lambda group: (group[0], group[1][::-1]),
        get_group_data_meta_info=lambda data: {"instances": sorted(data)},
    )
    queue = GroupQueue(3, "kernel", GroupFunctions.of_module(module))
    for number in range(3):
        queue.write(item(f"a{number}", "a", reward=float(number > 0)))
        queue.write(item(f"b{number}", "b", reward=float(number > 1)))
    data, meta = queue.read()
    assert uids(data) == ["a2", "a1", "a0"]
    assert (meta["instances"], meta["invalid_groups"], meta["unfinished_groups"]) == (["a"], 1, 0)


def test_a_group_function_that_fails_keeps_the_item_out():
    def is_valid_group(group):
        raise KeyError("score")

    queue = GroupQueue(1, "kernel", GroupFunctions(is_valid_group=is_valid_group))
    with pytest.raises(KeyError, match="score"):
        queue.write(item("1"))
    assert queue.held == 0
    queue.functions = GroupFunctions(is_valid_group=lambda group: True)
    queue.write(item("1"))
    assert uids(queue.read()[0]) == ["1"]


@pytest.mark.parametrize("seed", range(20))
def test_random_orders_with_lost_answers_lose_and_double_nothing(seed):
    rng = random.Random(seed)
    size, instances, epochs = rng.randint(1, 4), rng.randint(1, 6), rng.randint(1, 3)
    wanted = [
        (f"{epoch}-{instance}-{copy}", str(instance))
        for epoch in range(epochs)
        for instance in range(instances)
        for copy in range(size)
    ]
    rng.shuffle(wanted)
    queue = GroupQueue(size, "math", max_items=10_000)
    arrived: list[dict[str, Any]] = []
    last: int | None = None
    for uid, instance in wanted:
        for _ in range(rng.choice((1, 1, 2))):
            queue.write(item(uid, instance))
        if rng.random() < 0.4:
            data, meta = queue.read(last, acknowledges=True)
            if rng.random() < 0.6:  # else the answer is lost on its way
                arrived += data
                last = meta["batch_id"]
    data, meta = queue.read(last, acknowledges=True)
    arrived += data
    data, meta = queue.read(meta["batch_id"], acknowledges=True)
    arrived += data
    queue.read(meta["batch_id"], acknowledges=True)
    assert Counter(uids(arrived)) == Counter(uid for uid, _ in wanted)
    groups = [arrived[i : i + size] for i in range(0, len(arrived), size)]
    assert all(len({one["instance_id"] for one in group}) == 1 for group in groups)
    assert queue.held == 0
