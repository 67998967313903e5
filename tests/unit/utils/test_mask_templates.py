"""Loss masks under published chat templates (``tests/data/chat_templates``), against spans that the templates tell.

The oracle is the template itself, with a character written before and behind each turn of the assistant: so a turn is
known whatever text is in it.
"""

from __future__ import annotations

import copy
import itertools
import random
from pathlib import Path

import pytest

from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from tests.unit.utils.test_mask_utils import Slow, assistant, user
from tools.tiny_model import make_tokenizer

TEMPLATES = Path(__file__).parents[2] / "data" / "chat_templates"
CHATML = {  # what the generation prompt has behind its header
    "qwen2_5": "", "qwen2_5_vl": "", "qwen3": "", "qwen3_instruct_2507": "", "qwen3_5_think": "<think>\n",
    "qwen3_5_nothink": "<think>\n\n</think>\n\n", "qwen3_6": "<think>\n", "qwen3_8": "<think>\n",
}  # fmt: skip
HEADER = "<|im_start|>assistant\n"
BEGIN, END = "\ue100", "\ue101"
KINDS = ["qwen", "qwen3", "qwen3_5"]
PIECES = [
    "", "hello", "é 🎉", "\n", "<|im_end|>", "<|im_end|>\n", HEADER, "<|im_start|>user\n", "<think>\n", "<think>",
    "\n</think>\n\n", "<tool_call>", "<tool_response>x</tool_response>", " ", "\ue000", "<|", "0",
]  # fmt: skip


def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


def telling(text: str) -> str:
    """The template with ``BEGIN`` before and ``END`` behind what it writes for a message of the assistant."""
    loop = (
        "{% for message in messages %}" if "{% for message in messages %}" in text else "{%- for message in messages %}"
    )
    before, _, inside = text.rpartition(loop)
    depth, position = 1, 0
    while depth:  # the end of this loop
        opened, ended = inside.find("for ", position), inside.find("endfor", position)
        depth, position = (depth + 1, opened + 4) if 0 <= opened < ended else (depth - 1, ended + 6)
    start = inside.rindex("{%", 0, position - 6)
    mark = "{{%- if message['role'] == 'assistant' %}}{{{{- '{}' }}}}{{%- endif %}}"
    return before + loop + mark.format(BEGIN) + inside[:start] + mark.format(END) + inside[start:]


def tokenizers(name: str, folder: Path) -> list:
    """One of bytes, and one in which line ends are joined, as in those of the models."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    make_tokenizer(folder)
    plain = AutoTokenizer.from_pretrained(folder)
    joined = Tokenizer.from_str(
        plain.backend_tokenizer.to_str()
        .replace('"merges":[]', '"merges":[["Ċ","Ċ"]]')
        .replace('"vocab":{', '"vocab":{"ĊĊ":300,')
    )
    joined = PreTrainedTokenizerFast(tokenizer_object=joined)
    for one in (plain, joined):
        one.chat_template = template(name)
    return [plain, joined]


@pytest.fixture(scope="module", params=CHATML)
def family(request, tmp_path_factory):
    return request.param, tokenizers(request.param, tmp_path_factory.mktemp("tokenizer"))


def told(tokenizer, messages, tools=None):
    """The rendered text, and where the turns of the assistant are in it, headers included."""
    marked = copy.copy(tokenizer)
    marked.chat_template = telling(tokenizer.chat_template)
    plain = [{key: value for key, value in m.items() if key != "step_loss_mask"} for m in messages]
    parts = marked.apply_chat_template(plain, tokenize=False, tools=tools)
    text, spans = "", []
    for number, part in enumerate(parts.replace(END, BEGIN).split(BEGIN)):
        if number % 2:
            spans.append((len(text), len(text) + len(part)))
        text += part
    return text, spans


def expected(tokenizer, prompted, kind, messages, tools=None):
    text, spans = told(tokenizer, messages, tools)
    said = [m for m in messages if m["role"] == "assistant"]
    if kind == "qwen3":
        pieces, position, moved = [], 0, []
        for message, (start, stop) in zip(said, spans, strict=True):
            alone, ((begin, end),) = told(tokenizer, [user("?"), message])
            pieces += [text[position:start], alone[begin:end]]
            moved.append((sum(map(len, pieces[:-1])), sum(map(len, pieces))))
            position = stop
        text, spans = "".join([*pieces, text[position:]]), moved
    trained = []
    for message, (start, stop) in zip(said, spans, strict=True):
        start += len(HEADER)
        if text.startswith(prompted, start):
            start += len(prompted)
        elif prompted and text.startswith("<think>\n", start):  # both kinds of prompt begin so
            start += len("<think>\n") + (text.startswith("<think>\n\n", start) and prompted.startswith("<think>\n\n"))
        if message.get("step_loss_mask", 1) == 1:
            trained.append((start, stop))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = [int(any(start <= a < stop for start, stop in trained)) for a, _ in encoded["offset_mapping"]]
    return encoded["input_ids"], mask, [text[start:stop] for start, stop in trained]


def random_conversation(rng: random.Random, calls: bool):
    """Turns in any order behind a first question, with texts that hold markers and parts of them."""

    def text() -> str:
        return "".join(rng.choices(PIECES, k=rng.choice([0, 1, 1, 2, 4])))

    messages = [{"role": "system", "content": text()}] * rng.choice([0, 1]) + [user("q")]
    for _ in range(rng.randrange(1, 7)):
        role = rng.choice(["user", "assistant", "assistant", "tool" if calls else "user"])
        message = {"role": role, "content": text()}
        if role == "assistant":
            if rng.random() < 0.3:
                message["content"] = f"<think>\n{text()}\n</think>\n\n{message['content']}"
            if calls and rng.random() < 0.4:
                call = {"name": "f", "arguments": {"x": text(), "n": 3}}
                message["tool_calls"] = [{"type": "function", "function": call}] * rng.choice([1, 2])
            if rng.random() < 0.3:
                message["step_loss_mask"] = rng.choice([0, 1])
        messages.append(message)
    return messages


def compare(family, seeds):
    name, both = family
    for seed, tokenizer in itertools.product(seeds, both):
        rng = random.Random(seed)
        messages = random_conversation(rng, calls=name != "qwen2_5_vl")
        tools = [{"type": "function", "function": {"name": "f", "description": rng.choice(PIECES)}}]
        tools = tools if rng.random() < 0.4 else None
        kind = rng.choice(KINDS)
        ids, mask, texts = expected(tokenizer, CHATML[name], kind, messages, tools)
        generator = MultiTurnLossMaskGenerator(tokenizer, kind)
        assert generator.get_loss_mask(messages, tools) == (ids, mask), (seed, kind, messages)
        if tokenizer is both[0]:
            slow = MultiTurnLossMaskGenerator(Slow(tokenizer), kind)
            assert slow.get_loss_mask(messages, tools) == (ids, mask), (seed, kind, messages)
            assert "".join(generator.get_text_from_loss_mask(ids, mask)) == "".join(texts)
            whole = [ids[0], 7, 7, *ids[1:], 7]  # with tokens of an image
            found = generator.get_loss_mask_with_multimodal_alignment(messages, whole, tools)
            assert found == (whole, [0, 0, 0, *mask[1:], 0]), (seed, kind, messages)


def test_random_conversations(family):
    compare(family, range(15))


@pytest.mark.soak
def test_many_random_conversations(family):
    compare(family, range(1000, 2000))


HELLO = [user("hi"), assistant("hello"), user("more"), assistant("yes")]


@pytest.mark.parametrize("kind", ["qwen", "qwen3_5"])
@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("qwen2_5", "yes<|im_end|>\n"),
        ("qwen3_instruct_2507", "yes<|im_end|>\n"),
        ("qwen3_5_think", "\n</think>\n\nyes<|im_end|>\n"),
        ("qwen3_6", "\n</think>\n\nyes<|im_end|>\n"),
        ("qwen3_5_nothink", "yes<|im_end|>\n"),
    ],
)
def test_earlier_turns_without_reasoning_are_trained_from_their_first_token(name, last, kind, tmp_path):
    tokenizer = tokenizers(name, tmp_path)[0]
    generator = MultiTurnLossMaskGenerator(tokenizer, kind)
    assert generator.get_text_from_loss_mask(*generator.get_loss_mask(HELLO)) == ["hello<|im_end|>\n", last]


def test_a_prompt_that_switches_thinking_off_leaves_the_reasoning_of_a_turn_in(tmp_path):
    generator = MultiTurnLossMaskGenerator(tokenizers("qwen3_5_nothink", tmp_path)[0], "qwen3_5")
    messages = [user("q"), assistant("<think>\nwhy\n</think>\n\na")]
    trained = generator.get_text_from_loss_mask(*generator.get_loss_mask(messages))
    assert trained == ["why\n</think>\n\na<|im_end|>\n"]


@pytest.mark.parametrize(
    "said", ["say <|im_end|> and go on", "<|im_end|>", f"no{HEADER}yes<|im_end|>\n", "<|im_start|>"]
)
def test_a_turn_that_quotes_the_markers_is_trained_whole(said, tmp_path):
    generator = MultiTurnLossMaskGenerator(tokenizers("qwen2_5", tmp_path)[0])
    ids, mask = generator.get_loss_mask([user(said), assistant(said), user("b"), assistant("c")])
    assert generator.get_text_from_loss_mask(ids, mask) == [f"{said}<|im_end|>\n", "c<|im_end|>\n"]


@pytest.mark.parametrize("kind", ["qwen", "distill_qwen"])
def test_the_template_of_r1_distill_is_recognized(kind, tmp_path):
    tokenizer = tokenizers("deepseek_r1_distill", tmp_path)[0]
    generator = MultiTurnLossMaskGenerator(tokenizer, kind)
    messages = [user("q"), assistant("<think>\nt\n</think>\n\na")]
    ids, mask = generator.get_loss_mask(messages)
    assert tokenizer.decode(ids).endswith("<｜User｜>q<｜Assistant｜><think>\nt\n</think>\n\na")
    assert generator.get_text_from_loss_mask(ids, mask) == ["t\n</think>\n\na"]


@pytest.mark.parametrize(
    ("last", "seen"),
    [
        (user("thanks"), "got role 'user' and content 'thanks'"),
        ({"role": "tool", "content": "1"}, "got role 'tool'"),
        ({"role": "assistant", "content": None}, "content None"),
        ({"role": "assistant", "content": "a", "tool_calls": [{"name": "f"}]}, "tool_calls beside its content"),
        ({"role": "assistant", "content": "a", "reasoning_content": "t"}, "reasoning_content beside its content"),
    ],
)
def test_a_distilled_conversation_must_end_with_the_text_of_the_assistant(last, seen, tmp_path):
    generator = MultiTurnLossMaskGenerator(tokenizers("deepseek_r1_distill", tmp_path)[0], "distill_qwen")
    with pytest.raises(ValueError, match=r"trains on the last message, verbatim: expected the assistant's.*") as raised:
        generator.get_loss_mask([user("q"), assistant("a"), last])
    assert seen in str(raised.value)
