"""From messages to tokens, turn by turn, without ever tokenizing again what the engine generated.

The tokens that the engine saw and made are the truth. Of the chat template only the text between the model's message
and its next one is taken: it is rendered after a marker in the place of the model's message, and tokenized by itself.
"""

from __future__ import annotations

from typing import Any

from slime.rollout.environments.environment import Messages

MARKER = "\u2039slime-turn\u203a"


class ChatTurns:
    """One conversation. ``tokenizer`` has ``encode``, ``decode``, ``apply_chat_template`` and ``all_special_ids``."""

    def __init__(self, tokenizer: Any, tools: list[dict[str, Any]] | None, template_kwargs: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._kwargs = {**template_kwargs, **({"tools": tools} if tools else {})}
        self._special = set(tokenizer.all_special_ids)
        self._messages: Messages | None = None
        self._said = ""
        """What stands in the model's message since it began: earlier actions, and observations that are texts."""
        self.text = ""
        """Everything so far, as text."""

    def begin(self, prompt: str | Messages) -> list[int]:
        """Return the token ids of the prompt: a text as it is, or messages and the beginning of the model's one."""
        if isinstance(prompt, str):
            self._messages, self.text = None, prompt
        else:
            self._messages, self.text = list(prompt), self._render(prompt, opens=True)
        return self._encode(self.text)

    def action(self, tokens: list[int], text: str) -> str:
        """Return ``text``, which the engine's ``tokens`` say, without the special tokens at their end."""
        end = len(tokens)
        while end and tokens[end - 1] in self._special:
            end -= 1
            text = text.removesuffix(self._tokenizer.decode([tokens[end]], skip_special_tokens=False))
        return text

    def observe(self, said: str, tokens: list[int], observation: str | Messages) -> tuple[list[int], str]:
        """Return ids and text of what follows the model's turn, whose action was ``said`` and ``tokens`` end.

        Of a text that is the text itself. Of messages: the rest of the model's message, the messages, and the beginning
        of its next one. Raises ValueError for a template that does not write what the model said.
        """
        if isinstance(observation, str):
            self._said = self._said + said + observation
            return self._encode(observation), observation
        history = self._messages if self._messages is not None else [{"role": "user", "content": ""}]
        marked = {"role": "assistant", "content": MARKER}
        closing = self._encode(self._after_marker([*history, marked], opens=False))
        ids = self._encode(self._after_marker([*history, marked, *observation], opens=True))
        written = _overlap(tokens, ids, at_most=_common_prefix(closing, ids))
        if self._messages is not None:
            content = self._said + said
            self._messages = [*self._messages, {"role": "assistant", "content": content}, *observation]
        self._said = ""
        return ids[written:], self._tokenizer.decode(ids[written:], skip_special_tokens=False)

    def is_as_rendered(self) -> bool:
        """True when ``text`` is what the template makes of the messages; also where that cannot be said."""
        if self._messages is None or self._said:
            return True
        return self._render(self._messages, opens=True) == self.text

    def _render(self, messages: Messages, *, opens: bool) -> str:
        rendered = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=opens, **self._kwargs
        )
        return str(rendered)

    def _after_marker(self, messages: Messages, *, opens: bool) -> str:
        before, found, after = self._render(messages, opens=opens).rpartition(MARKER)
        if not found:
            raise ValueError(
                "the chat template does not write the content of the assistant's last message as it is, so the tokens "
                f"after it cannot be told: of a message {MARKER!r} it made {before[-200:] or after[-200:]!r}; let "
                "format_observation return a text, or use another --chat-template"
            )
        return after

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def _common_prefix(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _overlap(tokens: list[int], ids: list[int], at_most: int) -> int:
    """Return how many of the first ``ids``, ``at_most`` of them, ``tokens`` end with already."""
    longest = min(at_most, len(tokens))
    return next((n for n in range(longest, 0, -1) if tokens[-n:] == ids[:n]), 0)
