"""The interface of a provider's API: the parts that differ between providers."""

from __future__ import annotations

import abc
import itertools
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from slime.agent.same_answer import Message

__all__ = ["MODEL_LABEL", "Message", "ParsedRequest", "ProviderFormat"]

MODEL_LABEL = "slime-actor"
"""The only model in the list of models. Requests may name any: there is one."""


@dataclass(frozen=True)
class ParsedRequest:
    """The parts of an answer that are known before it is generated: ``id`` without the provider's prefix; ``numbers``
    are those of its events, where they have any."""

    body: Mapping[str, Any]
    prompt_tokens: int
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:24])
    created: int = field(default_factory=lambda: int(time.time()))
    numbers: Iterator[int] = field(default_factory=itertools.count, compare=False)

    @property
    def model(self) -> str:
        """As the request names it."""
        return str(self.body.get("model") or "")


class ProviderFormat(abc.ABC):
    """Translates requests in a provider's format to chat messages, and answers back."""

    @abc.abstractmethod
    def session_id(self, request: web.Request, body: Mapping[str, Any]) -> str:
        """The session that a request belongs to."""

    @abc.abstractmethod
    def translate(self, body: Mapping[str, Any]) -> tuple[list[Message], list[Message] | None]:
        """The request's messages, their calls with ids, and tools as chat templates take them."""

    @abc.abstractmethod
    def reply_message(self, reply: Any, body: Mapping[str, Any]) -> Message:
        """The message of a ``Reply`` in the provider's format, as the client will send it back."""

    @abc.abstractmethod
    def translate_reply(self, message: Message) -> Message:
        """The message that ``translate`` returns for the whole ``reply_message`` in a later request."""

    @abc.abstractmethod
    def reply_body(self, message: Message, reply: Any, asked: ParsedRequest) -> dict[str, Any]:
        """The whole answer."""

    @abc.abstractmethod
    def opening_events(self, asked: ParsedRequest) -> Iterable[bytes]:
        """The server-sent events that need nothing of the answer."""

    def keep_alive(self, asked: ParsedRequest) -> bytes:
        """The bytes that keep a stream open: a comment, unless clients count events only."""
        return b": wait\n\n"

    @abc.abstractmethod
    def reply_events(self, body: dict[str, Any], asked: ParsedRequest) -> Iterable[bytes]:
        """The whole answer as server-sent events, those that come after ``opening_events``."""

    @abc.abstractmethod
    def error_event(self, kind: str, message: str, asked: ParsedRequest) -> bytes:
        """The event that ends a stream whose turn has failed."""

    @abc.abstractmethod
    def error_body(self, kind: str, message: str) -> dict[str, Any]:
        """An error in the provider's format."""
