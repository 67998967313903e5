"""Loss masks of random conversations against ids and masks that are put together message by message."""

from __future__ import annotations

import copy

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from tools.tiny_model import make_tokenizer

CONTENT = st.text(st.characters(codec="utf-8", exclude_characters="<|>"), max_size=12)
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "user", "assistant", "tool"]),
        "content": CONTENT | CONTENT.map("<think>\n".__add__),
    },
    optional={"step_loss_mask": st.sampled_from([0, 1, 2])},
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(path)
    loaded = AutoTokenizer.from_pretrained(path)
    loaded.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return loaded


def by_message(tokenizer, messages, prompted=""):
    """The slow way: a byte is a token, markers are tokens, so pieces can be encoded one by one.

    ``prompted``: what the generation prompt has after the header, which is not trained in turns that begin with it.
    """
    ids, mask = [], []
    for message in messages:
        head = tokenizer(f"<|im_start|>{message['role']}\n", add_special_tokens=False)["input_ids"]
        body = tokenizer(f"{message['content']}<|im_end|>\n", add_special_tokens=False)["input_ids"]
        trained = message["role"] == "assistant" and message.get("step_loss_mask", 1) == 1
        ids += head + body
        untrained = len(prompted) if message["content"].startswith(prompted) else 0
        mask += [0] * (len(head) + untrained) + [int(trained)] * (len(body) - untrained)
    return ids, mask


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    messages=st.lists(MESSAGE, min_size=1, max_size=6),
    kind=st.sampled_from(["qwen", "qwen3", "qwen3_5"]),
    begun=st.sampled_from(["", "<think>\n"]),
)
def test_masks_of_random_conversations(tokenizer, messages, kind, begun):
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant\n{%", f"assistant\n{begun}{{%")
    generator = MultiTurnLossMaskGenerator(tokenizer, kind)
    expected = by_message(tokenizer, messages, begun)
    ids, mask = generator.get_loss_mask(messages)
    assert (ids, mask) == expected
    assert generator.get_loss_mask_with_multimodal_alignment(messages, ids) == expected
    first = mask.index(1) if 1 in mask else len(mask)
    assert generator.get_response_lengths([mask]) == [len(mask) - first]
    if not begun:  # else a character may be cut in its bytes
        texts = generator.get_text_from_loss_mask(ids, mask)
        assert sum(len(tokenizer(text)["input_ids"]) for text in texts) == sum(mask)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=st.lists(MESSAGE, min_size=1, max_size=4), answer=CONTENT.filter(bool))
def test_a_distilled_answer_follows_its_prompt_verbatim(tokenizer, messages, answer):
    generator = MultiTurnLossMaskGenerator(tokenizer, "distill_qwen")
    prompt = by_message(tokenizer, messages)[0]
    prompt += tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    response = tokenizer(answer, add_special_tokens=False)["input_ids"]
    found = generator.get_loss_mask([*messages, {"role": "assistant", "content": answer}])
    assert found == (prompt + response, [0] * len(prompt) + [1] * len(response))
