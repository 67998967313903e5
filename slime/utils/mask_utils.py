"""Token ids and loss masks of multi-turn conversations: 1 on what the assistant wrote, 0 elsewhere.

The conversation is rendered once, by the tokenizer's own chat template, and tokenized once; the assistant's turns are
found in that text. So the ids are exactly those the model sees, also where the template changes earlier turns. Where a
turn begins as the generation prompt does (the header, and the ``<think>`` of some templates), that part is not trained.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from slime.utils.chat_messages import media_messages, text_messages

if TYPE_CHECKING:
    from slime.utils.processing_utils import Tokenizer

Messages = list[dict[str, Any]]

ASSISTANT_HEADER = "<|im_start|>assistant\n"
DISTILL_HEADER = "<｜Assistant｜>"
THINK = "<think>\n"
QUESTION = {"role": "user", "content": "?"}


class Turn(NamedTuple):
    """Position of a turn of the assistant in a text: its header, what is trained of it, and its end."""

    header: int
    start: int
    stop: int


def get_response_lengths(loss_masks: Sequence[Sequence[int]]) -> list[int]:
    """Return, per mask, the number of tokens from its first 1 to its end (0 when it has none)."""
    return [len(mask) - list(mask).index(1) if 1 in mask else 0 for mask in loss_masks]


class MultiTurnLossMaskGenerator:
    """Builds ids and masks with the chat template of ``tokenizer``.

    ``tokenizer_type`` is the family: ``qwen``, ``qwen3``, ``qwen3_5`` (ChatML turns) or ``distill_qwen`` (the last
    message is the response, the others are the prompt), which ``qwen`` means where the template is that of
    R1-Distill. A message with ``step_loss_mask`` other than 1 is not trained.
    """

    def __init__(self, tokenizer: Tokenizer, tokenizer_type: str = "qwen") -> None:
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

    def get_loss_mask(
        self, messages: Messages, tools: list[Any] | None = None, *, with_images: bool = False
    ) -> tuple[list[int], list[int]]:
        """Return token ids and loss mask, of equal length, of a whole conversation.

        It must be text, or ``with_images``, of which each has the tokens that the chat template writes.
        """
        messages = (media_messages if with_images else text_messages)(messages, "the conversation")
        if self.tokenizer_type == "qwen" and self._prompts_as_distilled:
            return self.gen_multi_turn_loss_mask_distill_qwen(messages, tools)
        return self._build(messages, tools)

    def get_response_lengths(self, loss_masks: Sequence[Sequence[int]]) -> list[int]:
        """See the module's function of the same name."""
        return get_response_lengths(loss_masks)

    def gen_multi_turn_loss_mask_qwen(
        self, messages: Messages, tools: list[Any] | None = None
    ) -> tuple[list[int], list[int]]:
        """Mask the turns of a ChatML conversation (Qwen2, Qwen2.5), from after the generation prompt through their end.

        What a turn does not begin with is not left out of it: the ``<think>`` of the prompt is missing in turns whose
        reasoning the template drops.
        """
        return self._tokenize(*self._turns(messages, tools), self._trained_turns(messages))

    def gen_multi_turn_loss_mask_qwen3(
        self, messages: Messages, tools: list[Any] | None = None
    ) -> tuple[list[int], list[int]]:
        """As for Qwen2, with every turn of the assistant as the template renders it when it is the last one.

        So the reasoning of earlier turns stays and is trained, which Qwen3's template drops from a whole conversation.
        """
        return self._tokenize(*self._turns_as_last(messages, tools), self._trained_turns(messages))

    def gen_multi_turn_loss_mask_qwen3_5(
        self, messages: Messages, tools: list[Any] | None = None
    ) -> tuple[list[int], list[int]]:
        """As for Qwen2: the template drops the reasoning of turns before the last question, here as in use."""
        return self.gen_multi_turn_loss_mask_qwen(messages, tools)

    def gen_multi_turn_loss_mask_distill_qwen(
        self, messages: Messages, tools: list[Any] | None = None
    ) -> tuple[list[int], list[int]]:
        """Mask the last message, verbatim, after the rendered prompt (R1-Distill templates would cut its thinking).

        A ``<think>`` line that the prompt ends with is not repeated. Nothing is added at the end either. Raises
        ValueError when the last message is no text of the assistant.
        """
        last = messages[-1] if messages else {}
        answer = last.get("content")
        beside = [key for key in ("tool_calls", "reasoning_content") if last.get(key)]
        if last.get("role") != "assistant" or not isinstance(answer, str) or beside:
            seen = f"{beside[0]} beside its content" if beside else f"content {answer!r:.80}"
            raise ValueError(
                "--loss-mask-type distill_qwen trains on the last message, verbatim: expected the assistant's, with "
                f"all of it as text in its content, got role {last.get('role')!r} and {seen}"
            )
        prompt = self.tokenizer.apply_chat_template(
            messages[:-1], tokenize=False, add_generation_prompt=True, tools=tools
        )
        prompt_ids = self._ids(prompt)
        response_ids = self._ids(answer.removeprefix(THINK) if prompt.endswith(THINK) else answer)
        trained = int(last.get("step_loss_mask", 1) == 1)
        return prompt_ids + response_ids, [0] * len(prompt_ids) + [trained] * len(response_ids)

    def get_loss_mask_with_multimodal_alignment(
        self, messages: Messages, input_ids: Sequence[int], tools: list[Any] | None = None
    ) -> tuple[list[int], list[int]]:
        """Mask ids that a processor made of the conversation: the rendered turns are found in them one by one.

        Media may have additional tokens outside of the assistant's turns. Raises ValueError for a turn that is not in
        the ids as the template renders it.
        """
        ids = list(input_ids)
        variants = [self._turns, self._turns_as_last] if self.tokenizer_type == "qwen3" else [self._turns]
        wanted, marker = self._trained_turns(messages), self._ids(TURN_START)
        for render in variants:
            rendered, labels = self._labeled(*render(messages, tools))
            if (mask := _moved(rendered, labels, ids, wanted, marker)) is not None:
                return ids, mask
        found, expected = len(_places(marker, ids)), len(_places(marker, rendered))
        raise ValueError(
            f"found {found} turns in the token ids, expected {expected}, those of the assistant as the chat template "
            "renders them"
        )

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

    def _turns(self, messages: Messages, tools: list[Any] | None) -> tuple[str, list[Turn]]:
        """Return the rendered conversation and the turns of the assistant in it."""
        plain = [{key: value for key, value in m.items() if key != "step_loss_mask"} for m in messages]
        (plain, tools), written = without_markers((plain, tools))
        text = str(self.tokenizer.apply_chat_template(plain, tokenize=False, tools=tools))
        turns = []
        for header in re.finditer(re.escape(ASSISTANT_HEADER), text):
            end = text.find(TURN_END, header.end())
            stop = len(text) if end < 0 else end + len(TURN_END)
            turns.append(
                Turn(header.start(), self._behind_prompt(text, header.end()), stop + text.startswith("\n", stop))
            )
        expected = sum(message["role"] == "assistant" for message in messages)
        if len(turns) != expected:
            raise ValueError(
                f"the rendered conversation has {len(turns)} turns that begin with {ASSISTANT_HEADER!r}, but "
                f"{expected} assistant messages: the chat template is not ChatML, or leaves messages out (see "
                "--loss-mask-type)"
            )
        if not written:
            return text, turns
        restored = functools.partial(with_markers, written)
        return restored(text), [Turn(*(len(restored(text[:place])) for place in turn)) for turn in turns]

    def _turns_as_last(self, messages: Messages, tools: list[Any] | None) -> tuple[str, list[Turn]]:
        """The same with every turn as the template renders it behind a question, at the end."""
        text, turns = self._turns(messages, tools)
        said = (message for message in messages if message["role"] == "assistant")
        whole, moved, position = "", [], 0
        for message, turn in zip(said, turns, strict=True):
            whole += text[position : turn.header]
            alone, (last,) = self._turns([QUESTION, message], None)
            moved.append(Turn(*(len(whole) + place - last.header for place in last)))
            whole += alone[last.header : last.stop]
            position = turn.stop
        return whole + text[position:], moved

    def _behind_prompt(self, text: str, start: int) -> int:
        """Return the end of what the generation prompt has behind its header, in a turn that starts at ``start``.

        A line that only begins like one of the prompt is the turn's own. A prompt that switches thinking off
        (``<think>``, empty, ``</think>``) has the first line of a turn that thinks.
        """
        for line in self._prompted_lines:
            if not text.startswith(line, start):
                break
            start += len(line)
        return start

    @functools.cached_property
    def _prompt(self) -> str:
        return str(self.tokenizer.apply_chat_template([QUESTION], tokenize=False, add_generation_prompt=True))

    @functools.cached_property
    def _prompted_lines(self) -> list[str]:
        _, header, more = self._prompt.rpartition(ASSISTANT_HEADER)
        return more.splitlines(keepends=True) if header else []

    @functools.cached_property
    def _prompts_as_distilled(self) -> bool:
        return DISTILL_HEADER in self._prompt and ASSISTANT_HEADER not in self._prompt

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _tokenize(self, text: str, turns: list[Turn], wanted: list[bool]) -> tuple[list[int], list[int]]:
        ids, labels = self._labeled(text, turns)
        return ids, [_is_trained(label, wanted) for label in labels]

    def _labeled(self, text: str, turns: list[Turn]) -> tuple[list[int], list[int]]:
        """Return the ids and where each one belongs: 0 outside of turns, 2 n + 1 in the header of turn n and what else
        the prompt has, 2 n + 2 in the rest of it."""
        edges = [place for turn in turns for place in turn]
        numbers = [0, *(label for n in range(len(turns)) for label in (2 * n + 1, 2 * n + 2, 0))]
        if not getattr(self.tokenizer, "is_fast", False):
            # Without offsets: the text is cut at the turns, which begin and end at special tokens or line ends.
            cut = [self._ids(text[a:b]) for a, b in itertools.pairwise([0, *edges, len(text)])]
            return [i for part in cut for i in part], [n for n, part in zip(numbers, cut, strict=True) for _ in part]
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        labels, passed = [], 0
        for begin, _ in encoded["offset_mapping"]:
            while passed < len(edges) and begin >= edges[passed]:
                passed += 1
            labels.append(numbers[passed])
        return list(encoded["input_ids"]), labels


def _is_trained(label: int, wanted: Sequence[bool]) -> int:
    return int(label > 0 and label % 2 == 0 and wanted[label // 2 - 1])


def _moved(
    rendered: list[int], labels: list[int], ids: list[int], wanted: list[bool], marker: list[int]
) -> list[int] | None:
    """Return the mask of ``ids``, in which the labeled turns of ``rendered`` are; None where they are not.

    The nth ``marker``, with which turns of all roles begin, is the same in both.
    """
    there, here = _places(marker, rendered), _places(marker, ids)
    if len(there) != len(here):
        return None
    place_in_ids = dict(zip(there, here, strict=True))
    mask = [0] * len(ids)
    for turn, places in itertools.groupby(range(len(labels)), key=lambda place: (labels[place] + 1) // 2):
        start, *more = places
        if turn == 0:
            continue
        place, stop = place_in_ids[start], start + 1 + len(more)
        if ids[place : place + stop - start] != rendered[start:stop]:
            return None
        mask[place : place + stop - start] = [_is_trained(label, wanted) for label in labels[start:stop]]
    return mask


def _places(pattern: list[int], ids: list[int]) -> list[int]:
    width = len(pattern)
    return [i for i, first in enumerate(ids) if first == pattern[0] and ids[i : i + width] == pattern]


# ChatML's turn markers inside of messages, distinguished from those that the chat template writes


TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
_PRIVATE_USE = range(0xE000, 0xF900)


def without_markers(value: object) -> tuple[Any, dict[str, str]]:
    """Return ``value`` with a character in place of each marker in its texts, and which marker each one replaces.

    Rendered so, every marker in a conversation is the template's own.
    """
    texts = list(_texts(value))
    markers = [marker for marker in (TURN_START, TURN_END) if any(marker in text for text in texts)]
    if not markers:
        return value, {}
    used = set().union(*texts)
    free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
    written = {next(free): marker for marker in markers}

    def replaced(text: str) -> str:
        for character, marker in written.items():
            text = text.replace(marker, character)
        return text

    return _mapped(value, replaced), written


def with_markers(written: Mapping[str, str], text: str) -> str:
    """Return ``text`` with the markers that its characters replace."""
    for character, marker in written.items():
        text = text.replace(character, marker)
    return text


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from _texts(pair)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)


def _mapped(value: object, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    return type(value)(_mapped(item, change) for item in value) if isinstance(value, (list, tuple)) else value
