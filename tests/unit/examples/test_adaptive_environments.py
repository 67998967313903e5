"""Masks and rewards of the two environments, and their data."""

from __future__ import annotations

import json
import random

import pytest

from examples.adaptive_environments.environments import held_out_sums, hunt_size
from examples.adaptive_environments.make_data import make_data
from slime.utils.types import Sample
from tests.support.agents import END
from tests.support.episodes import player, trained

CONFIG = "examples/adaptive_environments/environments.yaml"


@pytest.fixture
def play():
    with player(environment_config=CONFIG) as found:
        yield found


def task(name: str, difficulty: int, **metadata: object) -> Sample:
    return Sample(index=0, metadata={"environment": name, "difficulty": difficulty, "seed": 7, **metadata})


def halving(size: int):
    """Play as well as one can."""

    def model(turns: list[str]) -> str:
        low, high = 1, size
        for guess, hint in zip(turns[1::2], turns[2::2], strict=False):
            low, high = (int(guess) + 1, high) if hint == "+" else (low, int(guess) - 1)
        return f"{(low + high) // 2:02d}"

    return model


@pytest.mark.parametrize("difficulty", [0, 1, 2])
def test_halving_finds_every_number_in_the_guesses_that_there_are(play, difficulty):
    size, guesses = hunt_size(difficulty)
    assert size == 2**guesses - 1
    turns = []
    for number in range(1, size + 1):
        sample = play(halving(size), task("hunt", difficulty, number=number), evaluation=True)
        assert sample.reward == 1.0
        assert sample.status == Sample.Status.COMPLETED
        turns.append(sample.environment_episode["turns"])
    assert sorted(turns) == sorted(depth for depth in range(1, guesses + 1) for _ in range(2 ** (depth - 1)))


def test_a_hunt_that_fails_has_no_reward_and_its_hints_no_loss(play):
    sample = play(lambda turns: "01", task("hunt", 1, number=5), evaluation=True)
    assert sample.reward == 0.0
    assert trained(sample) == f"01{END}" * 3
    assert sample.response.count("\n+") == 2
    hints = play(lambda turns: "what?", task("hunt", 0, number=2), evaluation=True)
    assert "user\n?" in hints.response


@pytest.mark.parametrize("right", [True, False])
def test_a_sum_is_right_or_wrong(play, right):
    def model(turns: list[str]) -> str:
        a, b = map(int, turns[0].removesuffix("=").split("+"))
        assert max(a, b) < 40
        return f"{a + b + (not right):03d}"

    sample = play(model, task("addition", 1))
    assert sample.reward == float(right)
    assert trained(sample) == sample.response


def test_sums_of_training_are_not_held_out(play):
    asked: list[str] = []
    held_out = set(held_out_sums())
    rng = random.Random(0)
    seeds = [rng.getrandbits(31) for _ in range(60)]
    for seed in seeds:
        sample = Sample(index=0, metadata={"environment": "addition", "difficulty": 2, "seed": seed})
        play(lambda turns: asked.append(turns[0]) or "1", sample)
    pairs = [tuple(map(int, text.removesuffix("=").split("+"))) for text in asked]
    assert len(pairs) == 60
    assert not held_out & set(pairs)


def test_the_data(tmp_path):
    make_data(tmp_path, seed=3, demonstrations=400)
    rows = {f.stem: [json.loads(line) for line in f.read_text().splitlines()] for f in tmp_path.glob("*.jsonl")}
    assert len(rows["addition"]) == len(held_out_sums()) == 512
    assert {row["metadata"]["number"] for row in rows["hunt"]} == set(range(1, 16))
    hunts = [row["messages"] for row in rows["sft"] if ".." in row["messages"][0]["content"]]
    sums = [row["messages"] for row in rows["sft"] if "+" in row["messages"][0]["content"]]
    assert (len(hunts), len(sums)) == (200, 200)
    for messages in hunts:
        assert [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2)
    asked = {tuple(map(int, m[0]["content"].removesuffix("=").split("+"))) for m in sums}
    assert not asked & set(held_out_sums())
