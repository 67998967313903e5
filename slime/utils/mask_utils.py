"""Token ids and loss masks of multi-turn conversations: 1 on what the assistant wrote, 0 elsewhere.

The conversation is rendered once, by the tokenizer's own chat template, and tokenized once; the assistant's turns are
found in that text. So the ids are exactly those the model sees, whatever the template does to earlier turns. What the
generation prompt already holds (the header, and the ``<think>`` of some templates) is not trained.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

Messages = list[dict[str, Any]]

ASSISTANT_HEADER = "<|im_start|>assistant\n"
TURN_END = "<|im_end|>"
THINK = "<think>\n"
QUESTION = {"role": "user", "content": "?"}


def get_response_lengths(loss_masks: Sequence[Sequence[int]]) -> list[int]:
    """Return, per mask, the number of tokens from its first 1 to its end (0 when it has none)."""
    return [len(mask) - list(mask).index(1) if 1 in mask else 0 for mask in loss_masks]


class MultiTurnLossMaskGenerator:
    """Builds ids and masks with the chat template of ``tokenizer``.

    ``tokenizer_type`` is the family: ``qwen``, ``qwen3``, ``qwen3_5`` (ChatML turns) or ``distill_qwen`` (the last
    message is the response, the others are the prompt). A message with ``step_loss_mask`` other than 1 is not trained.
    """

    def __init__(self, tokenizer: Any, tokenizer_type: str = "qwen") -> None:
        builders = {
            "qwen": self.gen_multi_turn_loss_mask_qwen,
            "qwen3": self.gen_multi_turn_loss_mask_qwen3,
            "qwen3_5": self.gen_multi_turn_loss_mask_qwen3_5,
            "distill_qwen": self.gen_multi_turn_loss_mask_distill_qwen,
        }
        if tokenizer_type not in builders:
            raise ValueError(f"--loss-mask-type {tokenizer_type!r} is unknown, expected one of {sorted(builders)}")
        self.tokenizer = tokenizer
        self.tokenizer_type = tokenizer_type
        self._build = builders[tokenizer_type]

    def get_loss_mask(self, messages: Messages, tools: list[Any] | None = None) -> tuple[list[int], list[int]]:
        """Return token ids and loss mask, of equal length, of a whole conversation."""
        return self._build(messages, tools)

    def get_response_lengths(self, loss_masks: Sequence[Sequence[int]]) -> list[int]:
        """See the module's function of the same name."""
        return get_response_lengths(loss_masks)

    def gen_multi_turn_loss_mask_qwen(
        self, messages: Messages, tools: list[Any] | None = None
    ) -> tuple[list[int], list[int]]:
        """Mask the turns of a ChatML conversation (Qwen2, Qwen2.5), from after the generation prompt through their end.

        Of every turn as many tokens are left out as the generation prompt has, also where a turn begins otherwise.
        """
        text, spans = self._turns(messages, tools)
        trained = self._trained_turns(messages)
        return self._tokenize(text, [span for span, wanted in zip(spans, trained, strict=True) if wanted])

    def gen_multi_turn_loss_mask_qwen3(
        self, messages: Messages, tools: list[Any] | None = None
    ) -> tuple[list[int], list[int]]:
        """As for Qwen2, with every turn of the assistant as the template renders it when it is the last one.

        So the reasoning of earlier turns stays and is trained, which Qwen3's template drops from a whole conversation.
        """
        text, spans = self._turns(messages, tools)
        said = [message for message in messages if message["role"] == "assistant"]
        whole, kept, position = "", [], 0
        for message, wanted, (start, stop) in zip(said, self._trained_turns(messages), spans, strict=True):
            alone, ((begin, end),) = self._turns([QUESTION, message], None)
            whole += text[position:start] + alone[begin:end]
            if wanted:
                kept.append((len(whole) - (end - begin), len(whole)))
            position = stop
        return self._tokenize(whole + text[position:], kept)

    def gen_multi_turn_loss_mask_qwen3_5(
        self, messages: Messages, tools: list[Any] | None = None
    ) -> tuple[list[int], list[int]]:
        """As for Qwen2: the template drops the reasoning of turns before the last question, here as in use."""
        return self.gen_multi_turn_loss_mask_qwen(messages, tools)

    def gen_multi_turn_loss_mask_distill_qwen(
        self, messages: Messages, tools: list[Any] | None = None
    ) -> tuple[list[int], list[int]]:
        """Mask the last message, verbatim, after the rendered prompt (R1-Distill templates would cut its thinking).

        A ``<think>`` line that the prompt ends with is not repeated. Nothing is added at the end either.
        """
        prompt = self.tokenizer.apply_chat_template(
            messages[:-1], tokenize=False, add_generation_prompt=True, tools=tools
        )
        answer = messages[-1]["content"]
        prompt_ids = self._ids(prompt)
        response_ids = self._ids(answer.removeprefix(THINK) if prompt.endswith(THINK) else answer)
        trained = int(messages[-1].get("step_loss_mask", 1) == 1)
        return prompt_ids + response_ids, [0] * len(prompt_ids) + [trained] * len(response_ids)

    def get_loss_mask_with_multimodal_alignment(
        self, messages: Messages, input_ids: Sequence[int], tools: list[Any] | None = None
    ) -> tuple[list[int], list[int]]:
        """Mask ids that a processor made (with media tokens in them): the turns are found by their marker tokens."""
        ids = list(input_ids)
        header, end = self._ids(ASSISTANT_HEADER), self._ids(TURN_END)
        newline = self._ids("\n")
        spans = []
        position = 0
        while (start := _find(ids, header, position)) >= 0:
            start += len(header)
            stop = _find(ids, end, start)
            stop = len(ids) if stop < 0 else stop + len(end)
            if ids[stop : stop + len(newline)] == newline:
                stop += len(newline)
            spans.append((start, stop))
            position = stop
        trained = self._trained_turns(messages)
        if len(spans) != len(trained):
            raise ValueError(f"found {len(spans)} assistant turns in the token ids, expected {len(trained)}")
        mask = [0] * len(ids)
        for (start, stop), wanted in zip(spans, trained, strict=True):
            start += min(self._prompted_tokens, stop - start)
            mask[start:stop] = [int(wanted)] * (stop - start)
        return ids, mask

    def get_text_from_loss_mask(self, token_ids: Sequence[int], loss_masks: Sequence[int]) -> list[str]:
        """Return the decoded text of each unbroken stretch of trained tokens."""
        texts, stretch = [], []
        for token, trained in zip(token_ids, loss_masks, strict=True):
            if trained:
                stretch.append(token)
            elif stretch:
                texts.append(self.tokenizer.decode(stretch))
                stretch = []
        return [*texts, self.tokenizer.decode(stretch)] if stretch else texts

    @staticmethod
    def _trained_turns(messages: Messages) -> list[bool]:
        return [m.get("step_loss_mask", 1) == 1 for m in messages if m["role"] == "assistant"]

    def _turns(self, messages: Messages, tools: list[Any] | None) -> tuple[str, list[tuple[int, int]]]:
        """Return the rendered conversation and where each turn of the assistant is in it, without its header."""
        plain = [{key: value for key, value in m.items() if key != "step_loss_mask"} for m in messages]
        text = str(self.tokenizer.apply_chat_template(plain, tokenize=False, tools=tools))
        spans = []
        for header in re.finditer(re.escape(ASSISTANT_HEADER), text):
            end = text.find(TURN_END, header.end())
            stop = len(text) if end < 0 else end + len(TURN_END)
            spans.append((header.end(), stop + text.startswith("\n", stop)))
        expected = sum(message["role"] == "assistant" for message in messages)
        if len(spans) != expected:
            raise ValueError(
                f"the rendered conversation has {len(spans)} turns that begin with {ASSISTANT_HEADER!r}, but "
                f"{expected} assistant messages. Either the chat template is not ChatML (see --loss-mask-type) or "
                "a message contains the marker itself."
            )
        return text, spans

    @functools.cached_property
    def _prompted_tokens(self) -> int:
        """How many tokens the generation prompt has after the header of the assistant's turn."""
        prompt = self.tokenizer.apply_chat_template([QUESTION], tokenize=False, add_generation_prompt=True)
        _, header, more = str(prompt).rpartition(ASSISTANT_HEADER)
        return len(self._ids(header + more)) - len(self._ids(header)) if header else 0

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _tokenize(self, text: str, spans: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
        if not getattr(self.tokenizer, "is_fast", False):
            return self._tokenize_pieces(text, spans)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, mask = list(encoded["input_ids"]), []
        remaining = iter(spans)
        start, stop = next(remaining, (len(text), len(text)))
        prompted = self._prompted_tokens
        for begin, _ in encoded["offset_mapping"]:
            while begin >= stop and stop < len(text):
                start, stop = next(remaining, (len(text), len(text)))
                prompted = self._prompted_tokens
            inside = start <= begin < stop
            mask.append(int(inside and prompted <= 0))
            prompted -= inside
        return ids, mask

    def _tokenize_pieces(self, text: str, spans: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
        """Without offsets: cut the text at the turns, which begin and end at special tokens or line ends."""
        ids: list[int] = []
        mask: list[int] = []
        position = 0
        for start, stop in [*spans, (len(text), len(text))]:
            before, turn = self._ids(text[position:start]), self._ids(text[start:stop])
            prompted = min(self._prompted_tokens, len(turn))
            ids += before + turn
            mask += [0] * (len(before) + prompted) + [1] * (len(turn) - prompted)
            position = stop
        return ids, mask


def _find(ids: list[int], pattern: list[int], start: int) -> int:
    width = len(pattern)
    return next((i for i in range(start, len(ids) - width + 1) if ids[i : i + width] == pattern), -1)
