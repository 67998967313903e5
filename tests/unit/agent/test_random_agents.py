"""Random agents of all protocols, which send answers back in lossy forms, before random chat templates: every token of
the engine that still stands is trained on, exactly once, and nothing else is.

Agents append, edit, branch, compact and ask again; they drop reasoning and text, trim, split, rename and clean what
they send back. Models write JSON and white space as they like; templates write it otherwise, strip reasoning, or trim.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slime.agent.trajectory import TrajectoryManager
from tests.support.agents import BEGIN, END
from tests.support.lossy_agents import AGENTS, Played, Step, Template, played
from tests.unit.agent.test_trajectory import BASE, SlowManager

pytestmark = pytest.mark.slow

arguments = st.lists(st.sampled_from(["b", "a", "c"]), unique=True).map(
    lambda keys: {key: {"b": 1, "a": "x ü\n y", "c": {"k": [1, None], "j": "z"}}[key] for key in keys}
)


@st.composite
def histories(draw: st.DrawFn, edits: bool) -> Any:
    """With or without agents that edit and templates that drop; without, no question is asked twice: what clients send
    back of two answers to it need not tell which of them it was."""
    hows = (
        ["on", "on", "on", "user", "edit", "branch", "compact", "again"] if edits else ["on", "on", "user", "compact"]
    )
    strips = draw(st.booleans()) and edits
    protocol = draw(st.sampled_from(sorted(AGENTS)))
    steps = [
        Step(
            draw(st.sampled_from(hows)),
            draw(st.lists(st.sampled_from(AGENTS[protocol].lossy), unique=True)),
            draw(st.sampled_from(["", "", "hm", "h\nm"])),
            draw(st.sampled_from(["", "yes", " yes", "no\n", "a  b\n\nc"])),
            draw(st.lists(arguments, max_size=2)),
            draw(st.sampled_from(["", "\n"])),
            draw(st.booleans()),
            draw(st.integers(0, 2)) if edits else number,
            draw(st.integers(0, 5)) == 0,
        )
        for number in range(draw(st.integers(1, 6)))
    ]
    return protocol, (strips, draw(st.booleans()), draw(st.booleans())), draw(st.sampled_from([0, 12, 40, 1024])), steps


def run(history: Any) -> tuple[list[Played], list[Any], list[tuple[int, float]], TrajectoryManager]:
    """The turns, the samples, and what is trained: pairs of token and log-prob; each log-prob is of one token."""
    protocol, how, threshold, steps = history
    manager = TrajectoryManager(fork_threshold_tokens=threshold)
    turns = list(played(protocol, how, steps, manager))
    samples = manager.get_trajectory("s", base_sample=BASE)
    trained = []
    for sample in samples:
        cut = len(sample.tokens) - sample.response_length
        rows = zip(sample.tokens[cut:], sample.loss_mask, sample.rollout_log_probs, strict=True)
        trained += [(token, log_prob) for token, mask, log_prob in rows if mask]
    return turns, samples, trained, manager


def pairs(one: Played) -> list[tuple[int, float]]:
    return list(zip(one.turn.output_ids, one.turn.output_log_probs, strict=True))


def standing(number: int, turns: list[Played]) -> int:
    """Count the tokens of an answer that a later prompt repeats in their place; all where nothing follows it.

    A prompt without an answer of its own says nothing: it is in no sample.

    Equal answers to equal requests cannot be distinguished: what follows one may be taken to follow the other.
    """
    one = turns[number].turn
    same = (turns[number].messages, turns[number].said)
    twins = {n for n, other in enumerate(turns) if (other.messages, other.said) == same}
    whole = [*one.prompt_ids, *one.output_ids]
    later = [other.turn.prompt_ids for other in turns if twins & set(other.after) and other.turn.output_ids]
    if not later:
        return len(one.output_ids)
    lengths = [next((i for i, (a, b) in enumerate(zip(whole, p, strict=False)) if a != b), len(whole)) for p in later]
    return max(0, max(lengths) - len(one.prompt_ids))


def check(history: Any) -> None:
    turns, samples, trained, _ = run(history)
    threshold = history[2]
    assert len(trained) == len(set(trained))
    made = [pair for one in turns for pair in pairs(one)]
    assert set(trained) <= set(made)
    for number, one in enumerate(turns):
        stand = len(one.turn.output_ids) if threshold == 0 else standing(number, turns)
        assert set(pairs(one)[:stand]) <= set(trained), f"turn {number}"
        lost = len(set(pairs(one)) - set(trained))
        assert lost == 0 or lost < threshold
    whole = [[*one.turn.prompt_ids, *one.turn.output_ids] for one in turns]
    assert all(sample.tokens in whole for sample in samples)
    counts = {"generated": len(made), "trained": len(trained), "realign": len(made) - len(trained)}
    for sample in samples:
        assert {name: sample.agent_session[f"{name}_tokens"] for name in counts} == counts
    slow = SlowManager(threshold)
    for one in turns:
        slow.record(one.messages, one.said, one.turn)
    shown = []
    for sample in samples:
        cut = len(sample.tokens) - sample.response_length
        signed = [t if m else -t for t, m in zip(sample.tokens[cut:], sample.loss_mask, strict=True)]
        shown.append((sample.tokens[:cut], signed))
    assert shown == slow.samples()


def check_own_tokens(history: Any) -> None:
    """Agents that edit nothing, before a template that drops nothing: all is trained on, the engine sees its own
    tokens, and after them what the template writes."""
    turns, _, trained, _ = run(history)
    assert sorted(trained) == sorted(pair for one in turns for pair in pairs(one))
    template = Template(*history[1])
    for one in turns:
        whole = [[*turns[n].turn.prompt_ids, *turns[n].turn.output_ids] for n in one.after]
        assert all(one.turn.prompt_ids[: len(held)] == held for held in whole)
        rendered = "".join(map(chr, template.apply_chat_template(one.messages))).split(BEGIN)
        seen = "".join(map(chr, one.turn.prompt_ids)).split(BEGIN)
        assert len(seen) == len(rendered)
        for text, own in zip(rendered, seen, strict=True):
            assert text == own or text.startswith("assistant\n")
            assert text.endswith(END) == own.endswith(END)


CALL_THEN_NOTHING = [
    Step("on", [], "", "", [{}], "", False, 0, cut=True),
    Step("edit", [], "", "", [], "", False, 0, cut=True),
]
"""An agent edits an answer, and the engine adds nothing to that."""


@settings(max_examples=60, deadline=None)
@example(("chat", (False, False, False), 1024, CALL_THEN_NOTHING))
@given(histories(edits=True))
def test_random_agents_and_templates(history):
    check(history)


@pytest.mark.soak
@settings(max_examples=10_000, deadline=None)
@given(histories(edits=True))
def test_many_random_agents_and_templates(history):
    check(history)


@settings(max_examples=60, deadline=None)
@given(histories(edits=False))
def test_what_lossy_clients_send_back_stays_the_models_own(history):
    check_own_tokens(history)


@pytest.mark.soak
@settings(max_examples=10_000, deadline=None)
@given(histories(edits=False))
def test_what_many_lossy_clients_send_back_stays_the_models_own(history):
    check_own_tokens(history)
