"""Tokens of conversations: against templates written out by hand, and a slow oracle on random ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime.rollout.environments.episode import ChatTurns
from tools.tiny_model import make_tokenizer

SPECIAL = {"<s>": 1, "<e>": 2, "<u>": 3, "<pad>": 4}
"""Special texts of one token; all other characters are their code point, pairs of letters one token."""


class PairTokenizer:
    """Merges pairs of equal letters, so that tokens of a whole text are not those of its parts put together."""

    all_special_ids = tuple(SPECIAL.values())

    def __init__(self, template: Any) -> None:
        self.template = template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids, at = [], 0
        while at < len(text):
            special = next((word for word in SPECIAL if text.startswith(word, at)), None)
            if special is not None:
                ids.append(SPECIAL[special])
                at += len(special)
            elif text[at : at + 2] == text[at] * 2:
                ids.append(0x110000 + ord(text[at]))
                at += 2
            else:
                ids.append(ord(text[at]))
                at += 1
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        words = {i: word for word, i in SPECIAL.items()}
        return "".join(words.get(i) or (chr(i) if i < 0x110000 else chr(i - 0x110000) * 2) for i in ids)

    def apply_chat_template(self, messages: Any, *, tokenize: bool, add_generation_prompt: bool, **kwargs: Any) -> str:
        return self.template(messages, add_generation_prompt)


class Template:
    """``before`` and ``after`` of each role; ``after`` of the model's ends its message. ``strips`` thinking of earlier
    turns, as templates of reasoning models do."""

    def __init__(self, before: dict[str, str], after: dict[str, str], strips: bool) -> None:
        self.before, self.after, self.strips = before, after, strips

    def __call__(self, messages: list[dict[str, Any]], opens: bool) -> str:
        text = ""
        for number, message in enumerate(messages):
            content = message["content"]
            later = any(one["role"] == "user" for one in messages[number + 1 :])
            if self.strips and message["role"] == "assistant" and later:
                content = content.rpartition("|")[2]
            text += self.before[message["role"]] + content + self.after[message["role"]]
        return text + (self.before["assistant"] if opens else "")


ROLES = ("user", "assistant", "tool")
plain = st.text("ab\n", min_size=1, max_size=5)
pieces = st.lists(st.one_of(st.sampled_from(["<s>", "<u>", "<pad>"]), plain), max_size=3).map("".join)


@st.composite
def conversations(draw: Any) -> Any:
    ends = draw(st.sampled_from(["<e>", "<e>\n", "<e>\n\n", "\n", "aa"]))
    before = {role: draw(pieces) for role in ROLES}
    after = {"assistant": ends, **{role: draw(pieces) for role in ("user", "tool")}}
    template = Template(before, after, draw(st.booleans()))
    roles = st.sampled_from(["user", "tool"])
    messages = st.lists(st.builds(lambda r, c: {"role": r, "content": c}, roles, plain), min_size=1, max_size=2)
    turns = draw(st.lists(st.tuples(st.text("ab|", min_size=1, max_size=6), st.booleans(), messages), max_size=4))
    return template, draw(messages), turns


def check(case: Any) -> None:
    """Assert that the appended tokens decode to the template's text between the end of an answer and the next turn."""
    template, prompt, turns = case
    tokenizer = PairTokenizer(template)
    chat = ChatTurns(tokenizer, None, {})
    held = list(chat.begin(prompt))
    assert held == tokenizer.encode(template(prompt, True))
    text = template(prompt, True)
    messages = list(prompt)
    for said, ends_itself, observation in turns:
        ending = template.after["assistant"]
        first = "<e>" if ending.startswith("<e>") else ""
        generated = tokenizer.encode(said) + tokenizer.encode(first if ends_itself else "")
        held += generated
        text += said + (first if ends_itself else "")
        chat.text = text
        action = chat.action(generated, tokenizer.decode(generated))
        assert action == said
        ids, more = chat.observe(action, generated, observation)
        # the oracle writes every message out by itself
        rest = ending.removeprefix(first) if ends_itself else ending
        opened = "".join(template.before[m["role"]] + m["content"] + template.after[m["role"]] for m in observation)
        expected = rest + opened + template.before["assistant"]
        if not (ending in ("\n", "aa") and tokenizer.decode(generated).endswith(ending)):
            assert (more, tokenizer.decode(ids)) == (expected, expected)
        held, text = held + ids, text + more
        chat.text = text
        messages += [{"role": "assistant", "content": said}, *observation]
        assert chat.is_as_rendered() == (template(messages, True) == text)
    assert tokenizer.decode(held) == text


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(conversations())
def test_random_templates(case):
    check(case)


@pytest.mark.soak
@settings(max_examples=5000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(conversations())
def test_many_random_templates(case):
    check(case)


def test_a_template_that_rewrites_earlier_turns_is_noticed():
    template = Template(dict.fromkeys(ROLES, "<s>"), dict.fromkeys(ROLES, "<e>\n"), strips=True)
    chat = ChatTurns(PairTokenizer(template), None, {})
    chat.begin([{"role": "user", "content": "q"}])
    for said, role, same in (("x|y", "tool", True), ("z", "user", False)):
        tokens = [ord(c) for c in said] + [SPECIAL["<e>"]]
        chat.text += said + "<e>"
        ids, text = chat.observe(said, tokens, [{"role": role, "content": "o"}])
        assert text == "\n<s>o<e>\n<s>"
        assert ids == [10, 1, ord("o"), 2, 10, 1]
        chat.text += text
        assert chat.is_as_rendered() == same


def test_a_template_without_the_models_words_is_refused():
    chat = ChatTurns(PairTokenizer(lambda messages, opens: f"{len(messages)} messages"), None, {})
    chat.begin([{"role": "user", "content": "q"}])
    with pytest.raises(ValueError, match="does not write the content of the assistant's last message"):
        chat.observe("a", [97], [{"role": "user", "content": "o"}])


def test_a_byte_level_tokenizer_has_the_tokens_of_the_whole_conversation(tmp_path):
    """Without merges the tokens of a text are those of its parts: what is held is the whole conversation's encoding."""
    from transformers import AutoTokenizer

    make_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    chat = ChatTurns(tokenizer, None, {})
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "ä+1="}]
    held = chat.begin(messages)
    for said, ends_itself in (("über", True), ("", True), ("x <|im_start|>", False), ("2", True)):
        generated = tokenizer.encode(said + "<|im_end|>" * ends_itself, add_special_tokens=False)
        text = tokenizer.decode(generated, skip_special_tokens=False)
        action = chat.action(generated, text)
        observation = [{"role": "user", "content": f"{len(held)} tokens"}]
        chat.text += text
        ids, more = chat.observe(action, generated, observation)
        chat.text += more
        held += generated + ids
        messages += [{"role": "assistant", "content": said}, *observation]
        whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if ends_itself:
            assert action == said
        assert held == tokenizer.encode(whole, add_special_tokens=False)
