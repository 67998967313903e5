"""The environment that a group acts in, and difficulties that follow success and survive a resume."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from slime.rollout.environments import EnvironmentDataSource
from slime.utils.types import Sample
from tests.support.rollout_args import rollout_args

HERE = "tests.support.environments."
LEVELS = {"levels": 3, "start": 1, "window": 4, "raise_at": 0.75, "lower_at": 0.25}


@pytest.fixture
def make(tokenizer, tmp_path):
    def source(entries: list[dict[str, Any]], **flags: Any) -> EnvironmentDataSource:
        number = len(list(tmp_path.glob("*.yaml")))
        path = tmp_path / f"{number}.yaml"
        path.write_text(yaml.safe_dump({"environments": entries}))
        return EnvironmentDataSource(rollout_args(environment_config=str(path), **flags))

    return source


def entry(name: str, **fields: Any) -> dict[str, Any]:
    return {"path": HERE + "Guess", "name": name, **fields}


def finished(source: EnvironmentDataSource, *successes: bool) -> list[Sample]:
    """Draw a group and finish it: so many samples with these results."""
    (group,) = source.get_samples(1)
    for sample, success in zip(group, successes, strict=True):
        sample.environment_episode = {"success": success}
    source.record_completed(group)
    return group


def test_environments_are_drawn_by_weight(make):
    source = make([entry("a", weight=1), entry("b", weight=3), entry("c", weight=0)])
    count = 4000
    drawn = Counter(group[0].metadata["environment"] for group in source.get_samples(count))
    assert drawn.keys() == {"a", "b"}
    assert abs(drawn["a"] - count / 4) < 4 * math.sqrt(count * 0.25 * 0.75)


def test_a_group_has_one_task_and_a_number_always_has_the_same(make):
    entries = [entry("a"), entry("b")]
    first, second = make(entries), make(entries)
    groups = first.get_samples(6)
    tasks = [{(s.metadata["environment"], s.metadata["seed"]) for s in group} for group in groups]
    assert all(len(task) == 1 for task in tasks)
    assert len({seed for task in tasks for _, seed in task}) == 6
    again = [second.get_samples(1)[0] for _ in range(6)]
    assert [[s.metadata for s in group] for group in again] == [[s.metadata for s in group] for group in groups]
    assert all("difficulty" not in s.metadata for group in groups for s in group)


def test_rows_belong_to_the_environment_that_they_name(make, tmp_path):
    rows = tmp_path / "rows.jsonl"
    named = [("a", "a0"), ("b", "b0"), ("a", "a1"), ("a", "a2")]
    rows.write_text("".join(json.dumps({"input": p, "metadata": {"environment": n}}) + "\n" for n, p in named))
    source = make([entry("a"), entry("b")], prompt_data=str(rows), label_key=None)
    drawn: dict[str, list[str]] = {"a": [], "b": []}
    for group in source.get_samples(24):
        drawn[group[0].metadata["environment"]].append(group[0].prompt)
    assert drawn["a"] == [f"a{i % 3}" for i in range(len(drawn["a"]))]
    assert set(drawn["b"]) == {"b0"}
    shuffled = make([entry("a", weight=1), entry("b", weight=0)], prompt_data=str(rows), label_key=None,
                    rollout_shuffle=True)  # fmt: skip
    prompts = [group[0].prompt for group in shuffled.get_samples(9)]
    assert all(sorted(prompts[i : i + 3]) == ["a0", "a1", "a2"] for i in (0, 3, 6))
    with pytest.raises(ValueError, match="has no row of c; give the environment the weight"):
        make([entry("a"), entry("b"), entry("c")], prompt_data=str(rows), label_key=None)
    with pytest.raises(ValueError, match="'b', expected one of a, c"):
        make([entry("a"), entry("c")], prompt_data=str(rows), label_key=None)


def level(source: EnvironmentDataSource) -> int:
    return int(source.metadata["environments"]["a"]["level"])


@pytest.mark.parametrize(
    ("groups", "levels"),
    [
        ([(1, 1), (1, 0)], [1, 2]),  # 3 of 4 are raise_at
        ([(1, 1), (0, 0), (1, 1), (1, 1)], [1, 1, 1, 2]),  # the last four
        ([(0, 0), (1, 0)], [1, 0]),  # 1 of 4 is lower_at
        ([(0, 0)] * 4, [1, 0, 0, 0]),  # no lower than the first
        ([(1, 1)] * 6, [1, 2, 2, 2, 2, 2]),  # no higher than the last; the window begins again
    ],
)
def test_the_difficulty_follows_success(make, groups, levels):
    source = make([entry("a", difficulty=LEVELS)])
    assert [finished(source, *map(bool, group)) and level(source) for group in groups] == levels
    (group,) = source.get_samples(1)
    assert {s.metadata["difficulty"] for s in group} == {levels[-1]}


def test_episodes_of_another_level_and_those_seen_before_do_not_count(make):
    source = make([entry("a", difficulty=LEVELS)])
    (late,) = source.get_samples(1)
    group = finished(source, True, True)
    source.record_completed(group)  # it was returned from the buffer
    assert level(source) == 1
    finished(source, True, True)
    assert level(source) == 2
    for sample in late:
        sample.environment_episode = {"success": False}
    for _ in range(2):
        source.record_completed(late)
    assert source.metadata["environments"]["a"] == {"drawn": 3, "level": 2, "recent": []}


def test_a_resumed_run_continues_where_it_was(make, tmp_path: Path):
    entries = [entry("a", difficulty=LEVELS), entry("b")]
    flags = {"save": str(tmp_path), "load": str(tmp_path), "rollout_batch_size": 2}
    one = make(entries, **flags)
    while one.metadata.get("environments", {}).get("a", {}).get("level") != 2:
        finished(one, True, True)
    finished(one, True, False)
    one.save(0)
    after = [[s.metadata for s in group] for group in one.get_samples(8)]
    two = make(entries, **flags)
    two.load(0)
    assert [[s.metadata for s in group] for group in two.get_samples(8)] == after
    assert two.metadata == one.metadata
    fewer = make([entry("a", difficulty={**LEVELS, "levels": 2}), entry("b"), entry("new")], **flags)
    fewer.load(0)
    assert level(fewer) == 1
    assert {group[0].metadata["environment"] for group in fewer.get_samples(30)} == {"a", "b", "new"}


def test_groups_of_the_journal_count_once_in_a_resumed_run(make, tmp_path: Path):
    """They were counted after the checkpoint that the run is resumed from, so its state does not have them."""
    flags = {"save": str(tmp_path), "load": str(tmp_path), "rollout_batch_size": 2, "save_interval": 2}
    entries = [entry("a", difficulty=LEVELS)]
    one = make(entries, **flags, num_rollout=100)
    one.load(-1)
    for sample in (group := one.get_samples(1)[0]):
        sample.append_response_tokens(tokens=[5], log_probs=[-1.0], text="x")
        sample.status, sample.reward, sample.prompt = Sample.Status.COMPLETED, 1.0, [{"role": "user", "content": "q"}]
        sample.environment_episode = {"success": True}
    one.record_completed(group)
    one._recovery.journal.flush()
    two = EnvironmentDataSource(one.args)
    two.load(-1)
    (again,) = two.get_samples(1)
    assert [s.prompt for s in again] == [[{"role": "user", "content": "q"}]] * 2
    assert two.metadata["environments"]["a"]["recent"] == []
    for _ in range(2):
        two.record_completed(again)
    assert two.metadata == one.metadata
    assert two.metadata["environments"]["a"] == {"drawn": 1, "level": 1, "recent": [1, 1]}
