"""Changes on their way to an engine: a header and the encoded tensors, as one run of bytes.

``u8 length, JSON, payloads one after the other``. What a message says is meant for all ranks of an engine: they load
its tensors as they load a checkpoint's, under the names and in the shapes of Hugging Face.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import xxhash

from slime.weights.delta.codec import CorruptDeltaError, Form
from slime.weights.delta.manifest import Version

DTYPE = "slime_changes"
"""Stands where a request names the type of its tensor: a server without slime's plug-in refuses it, and does not take
the bytes for a weight."""

PartForm = Form | Literal["same"]


@dataclass(frozen=True)
class Part:
    """One tensor of a message.

    ``form``: of the codec (with new values, not differences), or ``same`` for one that has not changed, which another
    tensor of the message is loaded together with. ``plain``: the tensor is to be loaded as any other is. ``bytes`` of
    its payload.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    form: PartForm
    plain: bool = False
    bytes: int = 0


@dataclass(frozen=True)
class Message:
    """A part of what leads from ``base`` to ``target``; without a base the engine has the target already.

    ``first`` and ``last``: of the messages that lead there.
    """

    target: Version
    base: Version | None
    first: bool
    last: bool
    parts: Sequence[Part]

    def pack(self, payloads: Sequence[bytes]) -> bytearray:
        """Return the message with the payloads of its parts."""
        body = b"".join(payloads)
        header = json.dumps({**asdict(self), "sum": xxhash.xxh3_128_hexdigest(body)}).encode()
        return bytearray(struct.pack("<Q", len(header)) + header + body)

    @classmethod
    def unpack(cls, data: memoryview) -> tuple[Message, list[memoryview]]:
        """Return a message and the payloads of its parts. Raises CorruptDeltaError for what ``pack`` has not made."""
        try:
            (length,) = struct.unpack_from("<Q", data)
            found: dict[str, Any] = json.loads(bytes(data[8 : 8 + length]))
            body = data[8 + length :]
            expected, seen = found.pop("sum"), xxhash.xxh3_128_hexdigest(body)
            if seen != expected:
                raise ValueError(f"expected bytes of xxh3-128 {expected}, found {seen}")
            base = found.pop("base")
            parts = [Part(**{**part, "shape": tuple(part["shape"])}) for part in found.pop("parts")]
            message = cls(Version(**found.pop("target")), Version(**base) if base else None, parts=parts, **found)
        except (struct.error, ValueError, KeyError, TypeError) as e:
            raise CorruptDeltaError(f"{len(data)} bytes are no changes of weights: {type(e).__name__}: {e}") from e
        payloads, start = [], 0
        for part in parts:
            payloads.append(body[start : start + part.bytes])
            start += part.bytes
        return message, payloads
