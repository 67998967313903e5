"""Masks, rewards, memories as tokens and the loss, against an engine that answers by a function."""

from __future__ import annotations

import json
import random

import pytest
import torch

from examples.memagent import rollout
from examples.memagent.make_data import DIGITS, LETTERS, make_data
from examples.memagent.prepare_data import converted
from examples.memagent.prompts import NO_MEMORY, TokenTemplate
from examples.memagent.rollout import chunks_of, eval_log, generate, reward_func, score
from examples.memagent.run import EXAMPLE
from slime.utils.async_utils import run
from slime.utils.types import Sample
from tests.support.agents import BEGIN, END, ToolTokenizer
from tests.support.episodes import player, trained
from tests.unit.backends.megatron_utils import test_agent_losses as losses
from tests.unit.backends.megatron_utils.test_agent_losses import divisions, make_args, of_the_step, token_losses
from tests.unit.backends.megatron_utils.test_loss import VOCAB

SHORT = {
    "memagent_chunk_tokens": 4,
    "memagent_memory_tokens": 5,
    "memagent_answer_tokens": 20,
    "memagent_max_chunks": 3,
    "memagent_prompts": {"update": "{problem}|{memory}|{section}", "answer": "{problem}|{memory}"},
}


def sample(context: str = "..a7....", label: str = "7", index: int = 5) -> Sample:
    prompt = [{"role": "user", "content": "a"}]
    return Sample(index=index, group_index=2, prompt=prompt, label=label, metadata={"context": context})


def remembers(turns: list[str]) -> str:
    """The model: copies the digit behind the letter, or the memory."""
    problem, memory, *section = turns[0].split("|")
    if not section:
        return f"\\boxed{{{memory}}}"
    _, found, rest = section[0].partition(problem)
    return rest[0] if found else memory[:3]


def text(tokens: list[int]) -> str:
    return "".join(map(chr, tokens))


def test_every_conversation_is_a_sample_and_memories_continue_as_tokens():
    with player(generate, SHORT) as play:
        samples = play(remembers, sample("....a7......"))
    assert [one.metadata for one in samples] == [
        *[{"conversation": "memory", "chunks": 3}] * 3,
        {"conversation": "answer", "chunks": 3},
    ]
    prompts = [text(one.tokens[: len(one.tokens) - one.response_length]) for one in samples]
    assert prompts == [
        f"{BEGIN}user\n{asked}{END}{BEGIN}assistant\n"
        for asked in (f"a|{NO_MEMORY}|....", "a|No |a7..", "a|7|....", "a|7")
    ]
    assert [trained(one) for one in samples] == [f"No {END}", f"7{END}", f"7{END}", f"\\boxed{{7}}{END}"]
    for one in samples:
        assert one.loss_mask == [1] * one.response_length
        assert len(one.rollout_log_probs) == one.response_length
        assert (one.rollout_id, one.index, one.group_index) == (5, 5, 2)
    assert run(reward_func(None, samples)) == [1.0] * 4


def test_a_memory_that_was_cut_is_continued_as_it_is():
    with player(generate, SHORT) as play:
        samples = play(lambda turns: "123456789", sample())
    assert samples[0].status == Sample.Status.TRUNCATED
    assert "|12345|" in text(samples[1].tokens)


def test_the_switch_changes_the_mask_of_the_answer_alone():
    with player(generate, SHORT) as play:
        whole = play(remembers, sample())
    with player(generate, {**SHORT, "memagent_train_final_answer": False}) as play:
        memories = play(remembers, sample())
    assert [one.tokens for one in whole] == [one.tokens for one in memories]
    assert [one.loss_mask for one in memories[:-1]] == [one.loss_mask for one in whole[:-1]]
    assert memories[-1].loss_mask == [0] * whole[-1].response_length
    assert set(whole[-1].loss_mask) == {1}


def test_an_evaluation_returns_the_answer_and_reads_more():
    with player(generate, {**SHORT, "memagent_eval_max_chunks": 6}) as play:
        long = sample("...." * 5 + "a7..")
        found = play(remembers, long, evaluation=True)
        cut = play(remembers, long)
    assert found.metadata == {"conversation": "answer", "chunks": 6}
    assert run(reward_func(None, found)) == 1.0
    assert len(cut) == 4
    assert run(reward_func(None, cut))[0] == 1.0  # the middle is left out, not the end


@pytest.mark.parametrize("metadata", [{}, {"context": ""}, None])
def test_a_row_without_a_document_is_refused(metadata):
    bare = sample()
    bare.metadata = metadata
    said = r"sample index=5: metadata\[\"context\"\] has the document to read, and is (empty|missing)"
    with player(generate, SHORT) as play, pytest.raises(ValueError, match=said):
        play(remembers, bare)


def test_an_abort_takes_the_whole_execution_back(monkeypatch):
    """The second conversation is aborted: one sample is returned, as it was drawn."""
    real, asked = rollout.sglang_rollout.generate, []

    async def aborting(args, one, params, evaluation=False):
        asked.append(one)
        if len(asked) == 2:
            one.status = Sample.Status.ABORTED
            return one
        return await real(args, one, params, evaluation)

    monkeypatch.setattr(rollout.sglang_rollout, "generate", aborting)
    drawn = sample()
    with player(generate, SHORT) as play:
        back = play(remembers, drawn)
        assert back is drawn
        assert (back.status, back.response_length, back.reward, back.tokens) == (Sample.Status.ABORTED, 0, None, [])
        again = play(remembers, back)
    assert [one.metadata["conversation"] for one in again] == ["memory", "memory", "answer"]


def test_chunks():
    assert [list(chunk) for chunk in chunks_of(range(7), 3, 9)] == [[0, 1, 2], [3, 4, 5], [6]]
    assert [list(chunk) for chunk in chunks_of(range(20), 3, 3)] == [[0, 1, 2], [3, 15, 16], [17, 18, 19]]


def test_slots_are_filled_with_tokens():
    template = TokenTemplate(ToolTokenizer(), "{memory} of {problem}{memory} {other}", {})
    filled = template.fill(memory=[1, 2], problem=[3], section=[4])
    before, after = f"{BEGIN}user\n", f" {{other}}{END}{BEGIN}assistant\n"
    assert filled == [*map(ord, before), 1, 2, *map(ord, " of "), 3, 1, 2, *map(ord, after)]


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("So \\boxed{The  Beatles}.<|im_end|>", "beatles", 1.0),
        ("\\boxed{\\text{New York}}", ["Boston", "new york"], 1.0),
        ("\\boxed{a} then \\boxed{b}", {"ground_truth": {"target": ["a"]}}, 0.0),
        ("Paris", "Paris", 0.0),
        ("\\boxed{Paris}" + "." * 300, "Paris", 0.0),
        ("\\boxed{Paris}" + "." * 280, "Paris", 1.0),
        ("\\boxed{}", "Paris", 0.0),
    ],
)  # fmt: skip
def test_score(response, label, expected):
    assert score(response, label) == expected


def test_the_metrics_of_an_evaluation(monkeypatch):
    logged: list[dict[str, float]] = []
    monkeypatch.setattr(rollout, "log", lambda args, metrics, step: logged.append(metrics))
    answers = ["It is \\boxed{red fish}", "\\boxed{fish}", "a red fish it is"]
    samples = [Sample(response=said, label="red fish", metadata={"chunks": n}) for n, said in enumerate(answers)]
    assert eval_log(3, None, {"hqa": {"samples": samples}}, None) is False
    assert logged[0] == {
        "eval/hqa/sub_em": pytest.approx(2 / 3), "eval/hqa/f1": pytest.approx((1 + 2 / 3) / 3), "eval/hqa/chunks": 1.0,
        "eval/step": 3,
    }  # fmt: skip


def executions() -> list[Sample]:
    """Two prompts with three executions each, of unequal numbers of conversations, from the generate function."""
    rng, samples = random.Random(3), []
    with player(generate, SHORT) as play:
        for index in range(6):
            one = sample("." * 4 * (index % 3), "7", index)
            one.metadata["context"] += "a7.." if index in (1, 3, 4) else "a5.."
            one.group_index = index // 3
            made = play(lambda turns: remembers(turns) + "!" * rng.randrange(2), one)
            for conversation, reward in zip(made, run(reward_func(None, made)), strict=True):
                conversation.reward = reward
                conversation.tokens = [token % VOCAB for token in conversation.tokens]
                samples.append(conversation)
    return samples


def by_the_paper(samples: list[Sample]) -> tuple[float, list[torch.Tensor]]:
    """-sum_i sum_k sum_j (clipped term - beta KL) / sum_i sum_k |o_ik|, with A_i = R_i - mean(R) over executions."""
    leaves = [x.clone().requires_grad_() for x in losses.logits_of(samples, 1)]
    old, ref = losses.logits_of(samples, 2), losses.logits_of(samples, 3)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for i, one in enumerate(samples):
        rewards = {s.rollout_id: s.reward for s in samples if s.group_index == one.group_index}
        advantage = one.reward - sum(rewards.values()) / len(rewards)
        for value in token_losses(one, advantage, leaves[i], old[i], ref[i]):
            total, count = total + value, count + 1
    loss = total / count
    return loss.item(), list(torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("division", ["one", "one sample each", "shuffled"])
def test_the_loss_is_multi_conversation_dapo(division, monkeypatch):
    close = losses.logits_of  # policies near each other: the KL of a token is cut at 10
    monkeypatch.setattr(losses, "logits_of", lambda samples, seed: [0.3 * x for x in close(samples, seed)])
    samples = executions()
    counts = [sum(one.rollout_id == i for one in samples) for i in range(6)]
    assert counts == [2, 3, 4, 2, 3, 4]
    for group in (0, 1):
        assert {one.reward for one in samples if one.group_index == group} == {0.0, 1.0}
    assert {"--calculate-per-token-loss", "--disable-grpo-std-normalization"} <= {*EXAMPLE.flags}
    args = make_args(calculate_per_token_loss=True, grpo_std_normalization=False)
    loss, gradients = of_the_step(args, samples, divisions(len(samples))[division])
    tokens = sum(sum(one.loss_mask) for one in samples)
    expected, wanted = by_the_paper(samples)
    assert loss / tokens == pytest.approx(expected, abs=1e-6)
    for found, right in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(found / tokens, right, rtol=0, atol=1e-6)


def test_the_data(tmp_path):
    make_data(tmp_path, seed=1, demonstrations=2000)
    rows = {f.stem: [json.loads(line) for line in f.read_text().splitlines()] for f in tmp_path.glob("*.jsonl")}
    seen = {
        name: {(r["messages"][0]["content"], r["metadata"]["context"]) for r in rows[name]}
        for name in rows
        if name != "sft"
    }
    assert not seen["chunks_3"] & seen["train"]
    for name, lengths in (("train", {8, 12}), ("chunks_3", {12}), ("chunks_16", {64})):
        assert {len(context) for _, context in seen[name]} == lengths
        for row in rows[name]:
            letter, context = row["messages"][0]["content"], row["metadata"]["context"]
            assert context.count(letter) == 1
            assert context[context.index(letter) + 1] == row["label"]
            assert context.index(letter) % 4 < 3  # the digit is in the same chunk
    replies = {row["messages"][1]["content"] for row in rows["sft"]}
    assert {*DIGITS, "-", "\\boxed{-}", "\\boxed{0}"} <= replies
    assert {row["messages"][0]["content"][0] for row in rows["sft"]} == {*LETTERS}


def test_published_rows_are_converted(tmp_path):
    chat = [{"role": "user", "content": "who?"}]
    rows = [
        {"prompt": chat, "context": "text", "reward_model": {"ground_truth": ["A", "B"]}},
        {"input": "when?", "context": "more", "answers": "1066"},
        {"input": "gone?", "context": "", "answers": "x"},
    ]  # fmt: skip
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = list(converted(str(path)))
    assert [(row["messages"][0]["content"], row["label"], row["metadata"]["context"]) for row in found] == [
        ("who?", ["A", "B"], "text"),
        ("when?", ["1066"], "more"),
    ]
