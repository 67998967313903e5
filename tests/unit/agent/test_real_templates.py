"""Own tokens before chat templates as models have them, with a tokenizer that merges characters."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slime.agent.adapters import OpenAIAdapter
from slime.agent.trajectory import RENDERING, TrajectoryManager, TurnRecord
from tests.unit.agent.test_trajectory import BASE

CHATML = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if m.reasoning_content and loop.index0 > ns.last %}{{- '<think>\\n' + m.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}
{{- m.content.strip('\\n') }}
{%- for c in m.tool_calls or [] %}
{{- '\\n' if m.content or not loop.first }}{{- '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' + opening }}{% endif %}
"""  # noqa: E501
"""As Qwen3's: reasoning of answers before the last question is dropped, white space is trimmed."""
HEADERS = """{{- '<|im_start|>' }}
{%- for m in messages %}{{- '<|h|>' + m.role + '<|/h|>\\n\\n' }}
{%- if m.tool_calls %}
{%- if m.tool_calls | length > 1 %}{{ raise_exception('one call only') }}{% endif %}
{{- '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' + m.tool_calls[0].function.arguments | tojson + '}' }}
{%- else %}{{- m.content | trim }}{% endif %}
{{- '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|h|>assistant<|/h|>\\n\\n' }}{% endif %}"""  # noqa: E501
"""As Llama 3's: text beside a call is dropped, and so are further calls."""
PLAIN = """{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}{{ 'assistant:' }}"""
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|h|>", "<|/h|>"]


def tokenizer(template: str, opening: str = "") -> PreTrainedTokenizerFast:
    """Byte-level, with merges across what a template and a model write."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), ("a", "b"), ("{", '"'), ('"', ":"), (":", "Ġ"), ("y", "e"), ("ye", "s")]
    vocabulary = {piece: i for i, piece in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    model = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|im_end|>", additional_special_tokens=SPECIAL)
    made.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    made.chat_template = template.replace("opening", repr(opening))
    return made


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}]


def play(adapter: OpenAIAdapter, manager: TrajectoryManager, outputs: list[tuple[str, dict, list]]) -> list[TurnRecord]:
    """Outputs of the model with the messages that were given for them, and those that the agent sends after."""
    history: list[dict[str, Any]] = [{"role": "user", "content": "q"}]
    turns = []
    for text, given, after in outputs:
        messages, known = manager.follow("s", history)
        prompt, rendering = adapter.text._prompt(messages, None, known)
        output = adapter.tokenizer.encode(text)
        turn = TurnRecord(prompt, output, "stop", [-1.0] * len(output))
        said = {"role": "assistant", "content": "", **given}
        manager.record_turn(
            "s", turn=turn, prompt_messages=messages, response_message=said, metadata={RENDERING: rendering}
        )
        turns.append(turn)
        history += after
    return turns


def call(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "arguments": arguments}}]


RESULT = {"role": "tool", "content": "ab"}
COMPACT = '<think>\nhm\n</think>\n\n\n\nyes<tool_call>\n{"name":"f","arguments":{"a":1}}\n</tool_call><|im_end|>'


@pytest.mark.parametrize("opening", ["", "<think>\n"])
def test_a_call_with_other_spaces_after_reasoning_that_was_not_sent_back(opening: str):
    adapter = OpenAIAdapter(tokenizer=tokenizer(CHATML, opening), sglang_url="http://nowhere")
    manager = TrajectoryManager()
    given = {"content": "yes", "reasoning_content": "hm", "tool_calls": call({"a": 1})}
    echoed = {"role": "assistant", "content": "", "tool_calls": call({"a": 1})}
    first, second = play(
        adapter,
        manager,
        [(COMPACT.removeprefix(opening), given, [echoed, RESULT]), ("yes<|im_end|>", {"content": "yes"}, [])],
    )
    said = adapter.tokenizer.decode(second.prompt_ids)
    assert said == (
        f"<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n{COMPACT}\n<|im_start|>user\n<tool_response>\nab\n"
        f"</tool_response><|im_end|>\n<|im_start|>assistant\n{opening}"
    )
    [sample] = manager.get_trajectory("s", base_sample=BASE)
    assert sample.effective_response_length == len(first.output_ids) + len(second.output_ids)


def test_reasoning_that_the_template_drops_before_a_new_question_stays_dropped():
    adapter = OpenAIAdapter(tokenizer=tokenizer(CHATML), sglang_url="http://nowhere")
    manager = TrajectoryManager(fork_threshold_tokens=0)
    question = {"role": "user", "content": "r"}
    echoed = {"role": "assistant", "content": "yes"}
    given = {"content": "\nyes", "reasoning_content": "hm"}
    first, second, third = play(
        adapter,
        manager,
        [
            ("<think>\nhm\n</think>\n\n\nyes<|im_end|>", given, [echoed, question]),
            ("\nab\n<|im_end|>", {"content": "\nab\n"}, [{"role": "assistant", "content": "ab"}, question]),
            ("yes<|im_end|>", {"content": "yes"}, []),
        ],
    )
    begin = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>user\nr<|im_end|>\n"
    assert adapter.tokenizer.decode(second.prompt_ids) == f"{begin}<|im_start|>assistant\n"
    # the second answer has its own white space after the first one that is as the template has it
    assert third.prompt_ids[: len(second.prompt_ids) + len(second.output_ids)] == second.prompt_ids + second.output_ids
    samples = manager.get_trajectory("s", base_sample=BASE)
    assert [s.effective_response_length for s in samples] == [
        len(first.output_ids),
        len(second.output_ids) + len(third.output_ids),
    ]


def test_text_that_the_template_drops_beside_a_call():
    """The template has no place for it: what the model wrote is forked, as nothing of it stands."""
    adapter = OpenAIAdapter(tokenizer=tokenizer(HEADERS), sglang_url="http://nowhere")
    manager = TrajectoryManager(fork_threshold_tokens=0)
    given = {"content": "yes", "tool_calls": call({"a": 1})}
    echoed = {"role": "assistant", **given}
    text = 'yes{"name": "f", "parameters": {"a": 1}}<|im_end|>'
    first, second = play(adapter, manager, [(text, given, [echoed, RESULT]), ("ab<|im_end|>", {"content": "ab"}, [])])
    assert "yes" not in adapter.tokenizer.decode(second.prompt_ids)
    samples = manager.get_trajectory("s", base_sample=BASE)
    assert [sample.effective_response_length for sample in samples] == [len(first.output_ids), len(second.output_ids)]


def test_a_call_with_other_spaces_alone():
    adapter = OpenAIAdapter(tokenizer=tokenizer(HEADERS), sglang_url="http://nowhere")
    manager = TrajectoryManager()
    given = {"tool_calls": call({"a": 1})}
    text = '{"name":"f","parameters":{"a":1}}<|im_end|>'
    echoed = {"role": "assistant", **given}
    first, second = play(adapter, manager, [(text, given, [echoed, RESULT]), ("ab<|im_end|>", {"content": "ab"}, [])])
    assert adapter.tokenizer.decode(second.prompt_ids).endswith(
        f"{text}<|h|>tool<|/h|>\n\nab<|im_end|><|h|>assistant<|/h|>\n\n"
    )
    [sample] = manager.get_trajectory("s", base_sample=BASE)
    assert sample.effective_response_length == len(first.output_ids) + len(second.output_ids)


def test_a_template_without_special_tokens_is_followed_as_it_is():
    adapter = OpenAIAdapter(tokenizer=tokenizer(PLAIN), sglang_url="http://nowhere")
    manager = TrajectoryManager()
    echoed = {"role": "assistant", "content": "yes"}
    _, second = play(adapter, manager, [(" yes", {"content": " yes"}, [echoed]), ("ab", {"content": "ab"}, [])])
    assert adapter.tokenizer.decode(second.prompt_ids) == "user: q\nassistant:  yes\nassistant:"


def test_messages_are_never_left_out_where_the_template_ends_answers_otherwise():
    """The model ended its answer with a token that the template writes at the end of another message only."""
    template = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}
{{- '<|h|>' if m.role == 'assistant' else '<|im_end|>' }}{% endfor %}{{ '<|im_start|>assistant\\n' }}"""
    adapter = OpenAIAdapter(tokenizer=tokenizer(template), sglang_url="http://nowhere")
    manager = TrajectoryManager()
    after = [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "r"}]
    _, second = play(adapter, manager, [("yes<|im_end|>", {"content": "yes"}, after), ("ab", {"content": "ab"}, [])])
    assert adapter.tokenizer.decode(second.prompt_ids) == (
        "<|im_start|>user\nq<|im_end|><|im_start|>assistant\nyes<|h|><|im_start|>user\nr<|im_end|><|im_start|>assistant\n"
    )
