"""Words of other trainers are answered with the flag that they mean."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slime.arguments import ArgumentError, parse_args
from slime.arguments.command_line import read_words
from slime.arguments.spelling import hydra_settings
from tests.support.arguments import known, minimal_flags

PAGE = Path(__file__).parents[3] / "docs" / "en" / "reference" / "other_frameworks.md"


def test_the_page_has_the_table():
    rows = re.findall(r"^\| `([^`]+)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    assert [(key, flag.replace("`", "")) for key, flag in rows] == [
        (k, v.replace("`", "")) for k, v in hydra_settings().items()
    ]


def test_every_flag_of_the_table_exists(flags):
    options = {option for flag in flags for option in flag.options}
    assert {word for text in hydra_settings().values() for word in re.findall(r"--[a-z][a-z-]+", text)} <= options


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("actor_rollout_ref.actor.optim.lr=1e-6", "here it is --lr 1e-6"),
        ("actor.optim.lr=1e-6", "here it is --lr 1e-6"),
        ("--actor-rollout-ref.actor.optim.lr", "here it is --lr"),
        ("+actor_rollout_ref.rollout.n=8", "here it is --n-samples-per-prompt 8"),
        ("actor_rollout_ref.actor.use_kl_loss=True", "here it is --use-kl-loss"),
        ("data.train_files=$HOME/gsm8k/train.parquet", "here it is --prompt-data $HOME/gsm8k/train.parquet"),
        ("algorithm.adv_estimator=grpo", "here it is --advantage-estimator grpo"),
        ("actor_rollout_ref.rollout.name=sglang", "here it is no flag: engines are SGLang's"),
        ("trainer.balance_batch=True", "flags are written --flag value (`--help balance-batch` lists"),
    ],
)
def test_a_setting_of_hydra_is_named_and_translated(word, expected):
    for words in ([word, *minimal_flags()], [*minimal_flags(), word]):
        with pytest.raises(ArgumentError) as caught:
            parse_args(words)
        assert str(caught.value).startswith(f"{word} is a setting of Hydra; ")
        assert expected in str(caught.value)


def test_every_such_word_is_answered_at_once():
    with pytest.raises(ArgumentError) as caught:
        parse_args(["data.train_batch_size=64", "trainer.nnodes=2", *minimal_flags()])
    assert [line.rpartition("here it is ")[2] for line in str(caught.value).splitlines()] == [
        "--rollout-batch-size 64",
        "--actor-num-nodes 2",
    ]


def test_such_words_are_ignored_with_other_unknown_ones():
    assert parse_args([*minimal_flags(), "--ignore-unknown-flags", "--tracer.level", "3"]).num_rollout == 1


def test_values_of_flags_may_look_like_such_a_word():
    values = ["a", "a.jsonl", "b.c=d", "b.jsonl"]
    assert read_words(known()[1], ["--eval-prompt-data", *values])[0] == {"eval_prompt_data": values}
    word = "actor.optim.lr=1e-6"
    assert parse_args([*minimal_flags(), "--wandb-group", word]).wandb_group == word
