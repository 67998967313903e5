"""Answers that come as server-sent events, of which each repeats what the earlier ones said."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import aiohttp
import orjson

from slime.utils.http_errors import RETRIED_STATUSES, HttpRequestError, HttpTimeoutError, StreamLostError

logger = logging.getLogger(__name__)

STREAM_BUFFER = 1 << 20
"""Bytes of a stream that may wait for their reader."""
REST_DEADLINE_S = 5.0
_END = "[DONE]"
_FIELDS_WITHOUT_DATA = ("event:", "id:", "retry:", ":")


class LatestEvents:
    """Iterates over the JSON values of one answer: always the latest at hand, because it repeats the earlier ones.

    The end of the answer is its event ``[DONE]`` or an error; ``ended`` says whether it was reached. Lines that are no
    JSON are skipped with a warning. Raises HttpRequestError for an event that reports an error, HttpTimeoutError when
    nothing comes for ``timeout`` s, and StreamLostError when the connection ends before the answer, or the error is of
    the kind that says "later".
    """

    def __init__(self, reply: aiohttp.ClientResponse, timeout: float) -> None:
        self.ended = False
        self._reply = reply
        self._timeout = timeout
        self._buffer = bytearray()
        self._began = time.monotonic()

    def __aiter__(self) -> LatestEvents:
        return self

    async def __anext__(self) -> Any:
        while True:
            latest = None if self.ended else self._latest(await self._read_lines())
            if latest is not None:
                if isinstance(latest, dict) and "error" in latest:
                    self.ended = True
                    raise self._refusal(latest["error"])
                return latest
            if self.ended:
                await self._read_rest()
                raise StopAsyncIteration

    def close(self) -> None:
        """Give the connection back; one with an answer in progress is cut."""
        self._reply.release()

    async def _read_lines(self) -> list[str]:
        """Return the lines that are complete by now, at least one."""
        while True:
            data = await self._read()
            if not data:
                raise self._failure(StreamLostError, "ended before its answer did")
            self._buffer += data
            end = self._buffer.rfind(b"\n")
            if end >= 0:
                lines = self._buffer[:end].decode("utf-8", "replace").split("\n")
                del self._buffer[: end + 1]
                return lines

    async def _read(self, timeout: float | None = None) -> bytes:
        try:
            async with asyncio.timeout(timeout or self._timeout):
                return await self._reply.content.readany()
        except TimeoutError as e:
            raise self._failure(HttpTimeoutError, f"sent nothing for {self._timeout:g} s") from e
        except (aiohttp.ClientError, OSError) as e:
            raise self._failure(StreamLostError, f"broke off ({type(e).__name__}: {e})") from e

    async def _read_rest(self) -> None:
        """Read to the end of the connection's answer, so that the connection can be used again."""
        try:
            while await self._read(REST_DEADLINE_S):
                pass
        except HttpRequestError:  # the answer itself was complete
            self._reply.close()

    def _latest(self, lines: list[str]) -> Any:
        """Return the value of the last line that has one, or None."""
        for line in reversed(lines):
            name, _, text = line.partition(":")
            text = text.strip()
            if name == "data" and text == _END:
                self.ended = True
            elif name == "data":
                try:
                    return orjson.loads(text)
                except orjson.JSONDecodeError as e:
                    logger.warning("%s sent an event that is no JSON (%s): %.200s", self._reply.url, e, text)
            elif line.strip() and not line.startswith(_FIELDS_WITHOUT_DATA):
                logger.warning("%s sent a line that is no event: %.200s", self._reply.url, line)
        return None

    def _refusal(self, error: Any) -> HttpRequestError:
        code = error.get("code") if isinstance(error, dict) else None
        kind = StreamLostError if code in RETRIED_STATUSES else HttpRequestError
        status = code if isinstance(code, int) else None
        return self._failure(kind, "was refused", status, orjson.dumps(error).decode())

    def _failure(
        self, kind: type[HttpRequestError], reason: str, status: int | None = None, body: str = ""
    ) -> HttpRequestError:
        return kind(
            self._reply.method, str(self._reply.url), reason, status=status, body=body, attempts=1,
            elapsed=time.monotonic() - self._began,
        )  # fmt: skip
