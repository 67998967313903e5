"""Supervised rollouts: conversations become masked samples."""

from __future__ import annotations

import json
from types import SimpleNamespace

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
        args.loss_mask_type, args.loss_type = "qwen", "sft_loss"
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
    with pytest.raises(ValueError, match=r"sft.jsonl line 1 \(sample index=0\) trains no token"):
        sft_rollout.generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))


def test_strings_and_several_copies_are_refused(make_args):
    args = make_args(["plain text"])
    with pytest.raises(ValueError, match="needs chat messages as prompt"):
        sft_rollout.generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    args = make_args([turns("a", "b")], n_samples_per_prompt=2)
    with pytest.raises(ValueError, match="--n-samples-per-prompt 1, got 2"):
        sft_rollout.generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))


def test_a_source_that_ends_gives_what_it_has(make_args):
    args = make_args([turns("1+1", "2")])
    left = [[Sample(index=0, prompt=turns("1+1", "2"))]]
    source = SimpleNamespace(get_samples=lambda count: [left.pop()] if left else [])
    assert len(sft_rollout.generate_rollout(args, 0, source).samples) == 1
    with pytest.raises(RuntimeError, match="rollout 1: the data source has no more conversations"):
        sft_rollout.generate_rollout(args, 1, source)


def lengths(rows, args):
    """Tokens of each conversation and of the part before its first answer: a byte is a token, roles and markers too."""
    tokenizer = load_tokenizer(args.hf_checkpoint)
    whole = [tokenizer.apply_chat_template(row, tokenize=False) for row in rows]
    before = [text.partition("<|im_start|>assistant\n") for text in whole]
    return [
        [len(tokenizer(t)["input_ids"]) for t in (text, a + b)] for text, (a, b, _) in zip(whole, before, strict=True)
    ]


@pytest.mark.parametrize("limits", [{"rollout_max_context_len": 40}, {"rollout_max_prompt_len": 20}])
def test_conversations_beyond_a_limit_are_dropped_and_counted(limits, make_args, caplog):
    rows = [turns("q" * n, "a" * m) for n, m in [(3, 3), (50, 3), (3, 90), (9, 9), (20, 1), (1, 20), (4, 4), (5, 5)]]
    args = make_args(rows, rollout_batch_size=3)
    for name, limit in limits.items():
        setattr(args, name, limit)
    fit = [
        row
        for row, (whole, before) in zip(rows, lengths(rows, args), strict=True)
        if (whole if "rollout_max_context_len" in limits else before) <= next(iter(limits.values()))
    ]
    assert 3 < len(fit) < len(rows)
    source = RolloutDataSourceWithBuffer(args)
    first = sft_rollout.generate_rollout(args, 0, source)
    assert [sample.prompt for sample in iter_samples(first.samples)] == fit[:3]
    assert first.metrics["rollout/sft/dropped"] == rows.index(fit[2]) - 2 > 0
    assert f"{first.metrics['rollout/sft/dropped']} conversations were dropped" in caplog.text
    second = next(iter_samples(sft_rollout.generate_rollout(args, 1, source).samples))
    assert second.prompt == fit[3]


def test_data_without_a_conversation_that_fits_ends_the_run(make_args):
    args = make_args([turns("q" * 60, "a"), turns("q" * 70, "a")])
    args.rollout_max_context_len = 40
    with pytest.raises(ValueError, match="no conversation within --rollout-max-context-len 40"):
        sft_rollout.generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))


def test_conversations_beyond_a_micro_batch_are_counted(make_args, caplog):
    args = make_args([turns("q", "a" * 60), turns("q", "a")])
    args.use_dynamic_batch_size, args.max_tokens_per_gpu, args.context_parallel_size = True, 20, 2
    metrics = sft_rollout.generate_rollout(args, 0, RolloutDataSourceWithBuffer(args)).metrics
    assert metrics == {"rollout/sft/dropped": 0, "rollout/sft/above_max_tokens_per_gpu": 1}
    assert "1 are longer than --max-tokens-per-gpu and get a micro-batch of their own" in caplog.text
    args.use_dynamic_batch_size = False
    source = RolloutDataSourceWithBuffer(args)
    assert sft_rollout.generate_rollout(args, 0, source).metrics["rollout/sft/above_max_tokens_per_gpu"] == 0


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ([{"role": "user", "content": "x"}, {"role": "assistant"}], "message 1 must have a role and a content"),
        ([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}], "holds a part of type 'image'"),
        ([{"role": "user", "content": "x"}], "trains no token"),
        (["x"], "message 0 must have a role"),
    ],
)
def test_a_conversation_that_cannot_be_used_is_named_by_its_row(bad, said, make_args):
    args = make_args([turns("1", "2"), bad])
    with pytest.raises(ValueError, match=r"sft\.jsonl line 2 \(sample index=1\)") as raised:
        sft_rollout.generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert said in str(raised.value)


def test_calls_of_a_parquet_file_are_trained_as_they_were_written(make_args, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    def row(**arguments):
        call = {"function": {"name": "f", "arguments": arguments}}
        return [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]

    rows = [row(city="Paris"), row(expr="3*4")]
    args = make_args(rows)
    from_lines = sft_rollout.generate_rollout(args, 0, RolloutDataSourceWithBuffer(args)).samples
    args.prompt_data = str(tmp_path / "sft.parquet")
    pq.write_table(pa.Table.from_pylist([{"messages": row} for row in rows]), args.prompt_data)
    from_arrow = sft_rollout.generate_rollout(args, 0, RolloutDataSourceWithBuffer(args)).samples
    assert [sample.tokens for (sample,) in from_arrow] == [sample.tokens for (sample,) in from_lines]
    assert "expr" not in load_tokenizer(args.hf_checkpoint).decode(from_arrow[0][0].tokens)
