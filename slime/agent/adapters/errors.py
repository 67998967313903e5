"""What is answered instead of a turn."""

from __future__ import annotations


class Refusal(Exception):
    """A request that is refused: the HTTP ``status``, the provider's ``kind`` of error, and why."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind, self.message = status, kind, message


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


def bad_request(message: str) -> Refusal:
    return Refusal(400, "invalid_request_error", message)


def session_closed() -> Refusal:
    return Refusal(503, "overloaded_error", "session closed")
