"""Loss masks of conversations, with the tiny byte-level tokenizer and templates like those of the Qwen families."""

from __future__ import annotations

import pytest

from slime.utils.mask_utils import MultiTurnLossMaskGenerator, get_response_lengths
from tools.tiny_model import make_tokenizer

# Qwen3 keeps the thinking of the last turn only; tools are listed first; tool results join one user turn.
QWEN3_LIKE = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set c = m.content %}"
    "{% if m.role == 'assistant' and '</think>' in c and loop.index0 < ns.last %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if m.role == 'tool' %}"
    "{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>{{ c }}</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ c }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(path)
    return AutoTokenizer.from_pretrained(path)


@pytest.fixture
def qwen3(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", QWEN3_LIKE)
    return MultiTurnLossMaskGenerator(tokenizer, "qwen3")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str, **extra: int) -> dict[str, object]:
    return {"role": "assistant", "content": text, **extra}


@pytest.mark.parametrize("kind", ["qwen", "qwen3", "qwen3_5"])
def test_every_assistant_turn_is_trained_through_its_end(tokenizer, kind):
    generator = MultiTurnLossMaskGenerator(tokenizer, kind)
    messages = [{"role": "system", "content": "s"}, user("1+1?"), assistant("2 é 🎉"), user("ok"), assistant("bye")]
    ids, mask = generator.get_loss_mask(messages)
    text = (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2 é 🎉<|im_end|>\n"
        "<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\nbye<|im_end|>\n"
    )
    assert tokenizer.decode(ids) == text
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert generator.get_text_from_loss_mask(ids, mask) == ["2 é 🎉<|im_end|>\n", "bye<|im_end|>\n"]
    # in bytes: "2 é 🎉" is 1+1+2+1+4, the end marker one token, the line end one
    assert sum(mask) == (9 + 2) + (3 + 2)
    assert len(mask) == len(ids)


def test_step_loss_mask_takes_a_turn_out(tokenizer):
    generator = MultiTurnLossMaskGenerator(tokenizer)
    messages = [user("a"), assistant("one", step_loss_mask=0), user("b"), assistant("two", step_loss_mask=1)]
    ids, mask = generator.get_loss_mask(messages)
    assert generator.get_text_from_loss_mask(ids, mask) == ["two<|im_end|>\n"]
    assert "one" in tokenizer.decode(ids)


def test_the_mask_follows_what_the_template_does_to_earlier_thinking(qwen3, tokenizer):
    messages = [user("q"), assistant("<think>old</think>\na1"), user("q2"), assistant("<think>new</think>\na2")]
    ids, mask = qwen3.get_loss_mask(messages)
    assert qwen3.get_text_from_loss_mask(ids, mask) == ["a1<|im_end|>\n", "<think>new</think>\na2<|im_end|>\n"]
    assert "old" not in tokenizer.decode(ids)


def test_tools_and_consecutive_tool_messages(qwen3, tokenizer):
    messages = [
        user("weather?"), assistant("<tool_call>a</tool_call>"), {"role": "tool", "content": "sun"},
        {"role": "tool", "content": "rain"}, assistant("both"),
    ]  # fmt: skip
    ids, mask = qwen3.get_loss_mask(messages, tools=[{"name": "w"}])
    text = tokenizer.decode(ids)
    assert text.startswith('<|im_start|>system\nTools: [{"name": "w"}]')
    assert text.count("<|im_start|>user") == 2
    assert qwen3.get_text_from_loss_mask(ids, mask) == ["<tool_call>a</tool_call><|im_end|>\n", "both<|im_end|>\n"]


def test_the_marker_inside_a_message_is_noticed(tokenizer):
    generator = MultiTurnLossMaskGenerator(tokenizer)
    with pytest.raises(ValueError, match=r"2 turns .* but 1 assistant messages"):
        generator.get_loss_mask([user("say <|im_start|>assistant\nhi"), assistant("no")])


def test_distilled_models_train_on_the_last_message_verbatim(tokenizer):
    generator = MultiTurnLossMaskGenerator(tokenizer, "distill_qwen")
    ids, mask = generator.get_loss_mask([user("q"), assistant("<think>t</think>a")])
    prompt = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids) == prompt + "<think>t</think>a"
    assert generator.get_text_from_loss_mask(ids, mask) == ["<think>t</think>a"]
    _, mask = generator.get_loss_mask([user("q"), assistant("a", step_loss_mask=0)])
    assert sum(mask) == 0


def test_ids_with_media_tokens_in_them(tokenizer):
    generator = MultiTurnLossMaskGenerator(tokenizer)
    messages = [user("look"), assistant("one"), user("b"), assistant("two")]
    ids, mask = generator.get_loss_mask(messages)
    media = [0] * 7
    again, aligned = generator.get_loss_mask_with_multimodal_alignment(messages, ids[:3] + media + ids[3:])
    assert again == ids[:3] + media + ids[3:]
    assert aligned == mask[:3] + media + mask[3:]
    with pytest.raises(ValueError, match="found 2 assistant turns"):
        generator.get_loss_mask_with_multimodal_alignment(messages[:2], ids)


def test_a_tokenizer_without_offsets_gives_the_same(tokenizer):
    class Slow:
        is_fast = False

        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def __call__(self, text, **kwargs):
            return tokenizer(text, **kwargs)

    messages = [user("a"), assistant("one"), user("b"), assistant("two"), user("c")]
    assert MultiTurnLossMaskGenerator(Slow()).get_loss_mask(messages) == MultiTurnLossMaskGenerator(
        tokenizer
    ).get_loss_mask(messages)


def test_response_lengths():
    assert get_response_lengths([[0, 0, 1, 0, 1], [0, 0], [1, 1], []]) == [3, 0, 2, 0]


def test_unknown_types_are_refused(tokenizer):
    with pytest.raises(ValueError, match="--loss-mask-type 'llama' is unknown"):
        MultiTurnLossMaskGenerator(tokenizer, "llama")
