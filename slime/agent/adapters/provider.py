"""What differs between the APIs of the providers."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from aiohttp import web

Message = dict[str, Any]
MODEL_LABEL = "slime-actor"
"""The only model in the list of models. Requests may name any: there is one."""


class ProviderFormat(abc.ABC):
    """Translates requests in a provider's format to chat messages, and answers back."""

    max_tokens_keys: ClassVar[tuple[str, ...]]
    stop_keys: ClassVar[tuple[str, ...]]

    @abc.abstractmethod
    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Add the provider's paths; ``handle_turn`` answers those that generate."""

    @abc.abstractmethod
    def session_id(self, request: web.Request, body: Mapping[str, Any]) -> str:
        """The session that a request belongs to."""

    @abc.abstractmethod
    def translate(self, body: Mapping[str, Any]) -> tuple[list[Message], list[Message] | None]:
        """The request's messages and tools as chat templates take them."""

    @abc.abstractmethod
    def reply_message(self, reply: Any) -> Message:
        """The message of a ``Reply`` in the provider's format, as the client will send it back."""

    @abc.abstractmethod
    def translate_reply(self, message: Message) -> Message:
        """What ``translate`` returns for the ``reply_message`` in a later request."""

    @abc.abstractmethod
    def tree_messages(self, messages: list[Message]) -> list[Message]:
        """Translated messages without what clients do not send back: turns are matched by them."""

    @abc.abstractmethod
    def reply_body(self, message: Message, reply: Any, model: str) -> dict[str, Any]:
        """The whole answer."""

    @abc.abstractmethod
    def reply_events(self, body: dict[str, Any]) -> Iterable[bytes]:
        """The whole answer as server-sent events."""

    @abc.abstractmethod
    def error_body(self, kind: str, message: str) -> dict[str, Any]:
        """An error in the provider's format."""
