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


@pytest.mark.parametrize("kind", ["qwen", "qwen3", "qwen3_5"])
def test_qwen3_keeps_and_trains_earlier_reasoning_which_the_others_drop(qwen3, tokenizer, kind):
    generator = MultiTurnLossMaskGenerator(tokenizer, kind)
    messages = [user("q"), assistant("<think>old</think>\na1"), user("q2"), assistant("<think>new</think>\na2")]
    ids, mask = generator.get_loss_mask(messages)
    kept = "<think>old</think>\n" if kind == "qwen3" else ""
    first, last = f"{kept}a1<|im_end|>\n", "<think>new</think>\na2<|im_end|>\n"
    assert generator.get_text_from_loss_mask(ids, mask) == [first, last]
    text = f"<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n{first}"
    text += f"<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\n{last}"
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    messages[1]["step_loss_mask"] = 0
    again, mask = generator.get_loss_mask(messages)
    assert again == ids
    assert generator.get_text_from_loss_mask(ids, mask) == [last]


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


def test_a_template_that_leaves_messages_out_is_noticed(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", tokenizer.chat_template.replace("in messages", "in messages[1:]"))
    generator = MultiTurnLossMaskGenerator(tokenizer)
    with pytest.raises(ValueError, match=r"1 turns .* but 2 assistant messages"):
        generator.get_loss_mask([assistant("a"), user("b"), assistant("c")])


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
    with pytest.raises(ValueError, match="found 4 turns in the token ids, expected 2"):
        generator.get_loss_mask_with_multimodal_alignment(messages[:2], ids)
    with pytest.raises(ValueError, match=r"found 4 turns .* expected 4, those of the assistant as the chat template"):
        generator.get_loss_mask_with_multimodal_alignment([*messages[:3], assistant("three")], ids)


class Slow:
    """A tokenizer that tells no offsets."""

    is_fast = False

    def __init__(self, fast):
        self.fast = fast

    def __getattr__(self, name):
        return getattr(self.fast, name)

    def __call__(self, text, **kwargs):
        return self.fast(text, **kwargs)


def test_a_tokenizer_without_offsets_gives_the_same(tokenizer):
    messages = [user("a"), assistant("one"), user("b"), assistant("two"), user("c")]
    assert MultiTurnLossMaskGenerator(Slow(tokenizer)).get_loss_mask(messages) == MultiTurnLossMaskGenerator(
        tokenizer
    ).get_loss_mask(messages)


def test_response_lengths():
    assert get_response_lengths([[0, 0, 1, 0, 1], [0, 0], [1, 1], []]) == [3, 0, 2, 0]


# As of Qwen3: the reasoning is taken out of the content, and written for turns after the last question; the last turn
# has a block of reasoning in any case.
QWEN3_STYLE = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set parts = m.content.split('</think>') %}{% set said = parts[-1].lstrip('\n') %}"
    "{% set thought = parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 else '' %}"
    "<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ said }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As of Qwen3's models that always think: the generation prompt begins the reasoning.
THINKING_STYLE = QWEN3_STYLE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
# As of Qwen2.5: a system message where there is none, nothing done to reasoning.
QWEN25_STYLE = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe helpful.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROMPTING_STYLE = QWEN25_STYLE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
# As of the distilled models: no ChatML, the prompt begins the reasoning, answers lose theirs.
DISTILL_STYLE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<｜end｜>"
    "{% else %}<｜User｜>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
CONVERSATIONS = [
    [user("q"), assistant("<think>\nwhy\n</think>\n\nbecause")],
    [user("q"), assistant("<think>\nold\n</think>\n\na1"), user("q2"), assistant("<think>\nnew\n</think>\n\na2 é")],
    [
        {"role": "system", "content": "s"},
        user("q"),
        assistant("plain"),
        user("q2"),
        assistant("<think>\nx\n</think>\n\ny"),
    ],
    [user("q"), assistant("call"), {"role": "tool", "content": "sun"}, assistant("it is sunny"), user("thanks")],
    [user("q"), assistant("one", step_loss_mask=0), user("q2"), assistant("two", step_loss_mask=1)],
]


def message_by_message(tokenizer, messages):
    """Every message rendered on its own, behind a question; what it begins with of a generation prompt is untrained."""

    def render(some, **options):
        return tokenizer.apply_chat_template(some, tokenize=False, **options)

    def tokens(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    question = render([user("question")])
    prompt = render([user("question")], add_generation_prompt=True).removeprefix(question)
    header = "<|im_start|>assistant\n"
    ids, mask = [], []
    for number, message in enumerate(messages):
        alone = render([message]) if number == 0 else render([user("question"), message]).removeprefix(question)
        new = tokens(alone)
        trained = int(message["role"] == "assistant" and message.get("step_loss_mask", 1) == 1)
        begun = prompt if alone.startswith(prompt) else header
        untrained = len(tokens(begun)) if trained else len(new)
        ids += new
        mask += [0] * untrained + [1] * (len(new) - untrained)
    return ids, mask


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize(
    ("kind", "template"),
    [
        ("qwen", QWEN25_STYLE),
        ("qwen", PROMPTING_STYLE),
        ("qwen3", QWEN25_STYLE),
        ("qwen3", QWEN3_STYLE),
        ("qwen3", THINKING_STYLE),
        ("qwen3_5", QWEN25_STYLE),
        ("qwen3_5", PROMPTING_STYLE),
    ],
)
def test_masks_are_those_of_messages_rendered_one_by_one(tokenizer, monkeypatch, kind, template, messages):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    generator = MultiTurnLossMaskGenerator(tokenizer, kind)
    expected = message_by_message(tokenizer, messages)
    assert generator.get_loss_mask(messages) == expected
    assert generator.get_loss_mask_with_multimodal_alignment(messages, expected[0]) == expected
    slow = MultiTurnLossMaskGenerator(Slow(tokenizer), kind)
    assert slow.get_loss_mask(messages) == expected


def test_the_reasoning_that_the_generation_prompt_begins_is_trained_from_its_second_line(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", THINKING_STYLE)
    for kind, first in (("qwen3", "old\n</think>\n\na1<|im_end|>\n"), ("qwen3_5", None)):
        generator = MultiTurnLossMaskGenerator(tokenizer, kind)
        ids, mask = generator.get_loss_mask(CONVERSATIONS[1])
        texts = generator.get_text_from_loss_mask(ids, mask)
        assert texts[-1] == "new\n</think>\n\na2 é<|im_end|>\n"
        assert first is None or texts[0] == first
        # what is not trained of the last turn is the prompt that an engine is given
        rest = len(tokenizer(texts[-1], add_special_tokens=False)["input_ids"])
        assert tokenizer.decode(ids[:-rest]).endswith("<|im_start|>assistant\n<think>\n")


@pytest.mark.parametrize("begun", ["", "<think>\n"])
def test_a_distilled_answer_continues_the_reasoning_that_its_prompt_begins(tokenizer, monkeypatch, begun):
    monkeypatch.setattr(tokenizer, "chat_template", DISTILL_STYLE)
    generator = MultiTurnLossMaskGenerator(tokenizer, "distill_qwen")
    messages = [user("q"), assistant("<think>\nt</think>a"), user("q2"), assistant(f"{begun}t2\n</think>\n\nb")]
    ids, mask = generator.get_loss_mask(messages)
    assert (
        tokenizer.decode(ids)
        == "<｜User｜>q<｜Assistant｜>a<｜end｜><｜User｜>q2<｜Assistant｜><think>\nt2\n</think>\n\nb"
    )
    assert generator.get_text_from_loss_mask(ids, mask) == ["t2\n</think>\n\nb"]


def test_unknown_types_are_refused(tokenizer):
    with pytest.raises(ValueError, match="--loss-mask-type 'llama' is unknown"):
        MultiTurnLossMaskGenerator(tokenizer, "llama")
