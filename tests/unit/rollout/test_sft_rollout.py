"""Supervised rollouts: conversations become masked samples."""

from __future__ import annotations

import json

import pytest

from slime.rollout import sft_rollout
from slime.rollout.base_types import iter_samples
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample
from tests.support.rollout_args import rollout_args
from tools.tiny_model import make_tokenizer


@pytest.fixture
def make_args(tmp_path):
    make_tokenizer(tmp_path / "model")

    def make(rows, **overrides):
        path = tmp_path / "sft.jsonl"
        path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
        args = rollout_args(
            prompt_data=str(path), hf_checkpoint=str(tmp_path / "model"), input_key="messages", label_key=None,
            **{"n_samples_per_prompt": 1, "rollout_batch_size": 2, **overrides},
        )  # fmt: skip
        args.loss_mask_type = "qwen"
        return args

    return make


def turns(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def test_conversations_become_samples(make_args):
    args = make_args([turns("1+1", "2"), turns("2+2", "4 "), turns("3+3", "6")])
    source = RolloutDataSourceWithBuffer(args)
    first, second = iter_samples(sft_rollout.generate_rollout(args, 0, source).samples)
    assert [first.index, second.index] == [0, 1]
    assert first.reward == 0
    assert first.status == Sample.Status.COMPLETED
    assert first.response_length == len("2") + 2  # and the end of the turn, and its line end
    assert first.loss_mask == [1, 1, 1]
    assert second.response_length == 4
    text = "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    assert load_tokenizer(args.hf_checkpoint).decode(first.tokens) == text
    third = next(iter_samples(sft_rollout.generate_rollout(args, 1, source).samples))
    assert third.prompt == turns("3+3", "6")


def test_a_prompt_without_anything_to_train_is_refused(make_args):
    args = make_args([[{"role": "user", "content": "hello"}]])
    with pytest.raises(ValueError, match="sample index=0 trains no token"):
        sft_rollout.generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))


def test_strings_and_several_copies_are_refused(make_args):
    args = make_args(["plain text"])
    with pytest.raises(ValueError, match="needs chat messages as prompt"):
        sft_rollout.generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    args = make_args([turns("a", "b")], n_samples_per_prompt=2)
    with pytest.raises(ValueError, match="--n-samples-per-prompt 1, got 2"):
        sft_rollout.generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
