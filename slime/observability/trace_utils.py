"""Traces of samples: what happened to one sample, when, inside which span.

A trace is kept on the sample itself, as the plain dictionary ``sample.trace`` ("carrier"), so that it survives
``to_dict``/``from_dict``, process boundaries and debug dumps::

    {"version": 1, "trace_id", "sample_id", "group_id", "attempt", "events": [...]}

An event is ``{"type": "span_start"|"span_end"|"event", "name", "ts", "trace_id", "sample_id", "group_id", "attempt"}``
with ``span_id``, ``parent_span_id`` and ``attrs`` where they apply; ``ts`` is a Unix time in seconds.

Invariant: tracing never raises into user code. What goes wrong inside the tracer is logged once per kind. What the
traced code raises passes through untouched and is noted on the span as ``error_type`` and ``error_message``.
``SLIME_TRACE=0`` turns recording off.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import logging
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

if TYPE_CHECKING:
    from types import TracebackType

    from slime.utils.types import Sample

    Target: TypeAlias = "Sample | TraceHandle | Mapping[str, Any] | list[Any] | tuple[Any, ...] | None"

logger = logging.getLogger(__name__)

VERSION = 1
TRACE_CHILDREN_KEY = "_trace_children"
"""Attribute of a span that holds child spans measured elsewhere: ``[{"name", "start", "end", "attrs"}]``."""

F = TypeVar("F", bound=Callable[..., Any])
_CARRIER_KEYS = frozenset({"version", "trace_id", "attempt", "events"})
_NO_PARENTS: Mapping[str, str] = MappingProxyType({})
_parents: contextvars.ContextVar[Mapping[str, str]] = contextvars.ContextVar("slime_trace_parents", default=_NO_PARENTS)
_complained: set[str] = set()


@dataclass
class TraceHandle:
    """A carrier together with the span under which new spans are put (None: the innermost open one)."""

    carrier: dict[str, Any]
    parent_span_id: str | None = None


@dataclass
class Span:
    """An open span on one or more carriers; ``update`` adds attributes that are written when it ends."""

    name: str
    attrs: dict[str, Any] = field(default_factory=dict)
    ids: list[tuple[TraceHandle, str]] = field(default_factory=list)

    def update(self, attrs: Mapping[str, Any] | None = None, **more: object) -> None:
        """Add attributes."""
        self.attrs.update(attrs or {}, **more)


def bind_trace(sample: Sample) -> TraceHandle | None:
    """Give ``sample`` a trace if it has none and return its handle (None when tracing is off or impossible)."""
    with _harmless("bind_trace"):
        return _bind(sample) if _enabled() else None
    return None


def bind_trace_carrier(sample: Sample, carrier: dict[str, Any]) -> TraceHandle | None:
    """Attach an existing carrier (from another process or sample) to ``sample`` and return its handle."""
    with _harmless("bind_trace_carrier"):
        if not _is_carrier(carrier):
            raise ValueError(f"a trace carrier is a dict with version, trace_id and events, not {carrier!r:.200}")
        sample.trace = carrier
        return TraceHandle(carrier)
    return None


def export_trace(target: Target) -> dict[str, Any] | None:
    """Return a copy of the carrier of ``target`` that another process can import, with the open span as its parent."""
    with _harmless("export_trace"):
        handles = _handles(target)
        if handles:
            handle = handles[0]
            parent = handle.parent_span_id or _parents.get().get(handle.carrier["trace_id"])
            copy = {**handle.carrier, "events": [dict(e) for e in handle.carrier["events"]]}
            return {**copy, "parent_span_id": parent} if parent else copy
    return None


def import_trace(carrier: Mapping[str, Any]) -> TraceHandle | None:
    """Return a handle on an exported carrier; its spans go below the span that was open when it was exported."""
    with _harmless("import_trace"):
        if not _is_carrier(carrier):
            raise ValueError(f"a trace carrier is a dict with version, trace_id and events, not {carrier!r:.200}")
        copy = dict(carrier)
        return TraceHandle(copy, copy.pop("parent_span_id", None))
    return None


def trace_next_attempt(target: Target) -> None:
    """Note that the sample is generated again, as after an abort: later events carry the next attempt number."""
    with _harmless("trace_next_attempt"):
        for handle in _handles(target):
            handle.carrier["attempt"] += 1


def trace_event(target: Target, name: str, attrs: Mapping[str, Any] | None = None) -> None:
    """Record that something happened to ``target`` (sample, handle, carrier, or a nested list of them) just now."""
    with _harmless("trace_event"):
        for handle in _handles(target):
            _append(handle, "event", name, time.time(), None, _parent(handle), attrs)


@contextmanager
def trace_span(target: Target, name: str, attrs: Mapping[str, Any] | None = None) -> Iterator[Span]:
    """Record the body as span ``name`` of ``target`` (see :func:`trace_event`); spans nest within one task."""
    span = Span(name)
    token = None
    with _harmless("trace_span"):
        parents = dict(_parents.get())
        now = time.time()
        for handle in _handles(target):
            span_id = _new_span_id()
            _append(handle, "span_start", name, now, span_id, _parent(handle), attrs)
            span.ids.append((handle, span_id))
            parents[handle.carrier["trace_id"]] = span_id
        token = _parents.set(parents)
    try:
        yield span
    except BaseException as error:  # a cancelled body is worth seeing in the trace, too
        span.update(error_type=type(error).__name__, error_message=str(error)[:2000])
        raise
    finally:
        with _harmless("trace_span"):
            if token is not None:
                _parents.reset(token)
            _close(span)


def trace_function(
    name: str,
    target: str | Callable[..., Any] = "sample",
    attrs_getter: Callable[..., Mapping[str, Any]] | None = None,
) -> Callable[[F], F]:
    """Wrap a (coroutine) function in a span.

    ``target`` names the parameter that holds the sample(s), or is called with the function's arguments to find them;
    ``attrs_getter`` is called the same way and returns the attributes of the span.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)

        def open_span(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            found: Any = ()
            attrs: Mapping[str, Any] | None = None
            with _harmless("trace_function"):
                if callable(target):
                    found = target(*args, **kwargs)
                else:
                    found = signature.bind(*args, **kwargs).arguments[target]
                attrs = attrs_getter(*args, **kwargs) if attrs_getter else None
            return trace_span(found, name, attrs)

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def async_wrapper(*args: object, **kwargs: object) -> Any:
                with open_span(args, kwargs):
                    return await function(*args, **kwargs)

            return async_wrapper  # type: ignore[return-value]

        @functools.wraps(function)
        def wrapper(*args: object, **kwargs: object) -> Any:
            with open_span(args, kwargs):
                return function(*args, **kwargs)

        return wrapper  # type: ignore[return-value]

    return decorate


_META_KEYS = (
    "id", "prompt_tokens", "completion_tokens", "cached_tokens", "e2e_latency", "queue_time", "decode_throughput",
    "weight_version", "spec_accept_length", "spec_verify_ct",
)  # fmt: skip


def build_sglang_meta_trace_attrs(meta_info: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the span attributes that an SGLang reply's ``meta_info`` is good for.

    Where the engine reports its own time stamps, prefill and decode become child spans.
    """
    attrs: dict[str, Any] = {}
    with _harmless("build_sglang_meta_trace_attrs"):
        meta = meta_info or {}
        attrs = {key: meta[key] for key in _META_KEYS if meta.get(key) is not None}
        reason = meta.get("finish_reason")
        if reason is not None:
            attrs["finish_reason"] = reason.get("type") if isinstance(reason, Mapping) else reason
        begin, middle, end = (
            meta.get(key) for key in ("forward_entry_time", "prefill_finished_time", "request_finished_ts")
        )
        children = [
            {"name": name, "start": a, "end": b}
            for name, a, b in (("sglang_prefill", begin, middle), ("sglang_decode", middle, end))
            if a and b and b >= a
        ]
        if children:
            attrs[TRACE_CHILDREN_KEY] = children
    return attrs


def _enabled() -> bool:
    return os.environ.get("SLIME_TRACE", "1") != "0"


def _is_carrier(value: object) -> bool:
    return isinstance(value, Mapping) and _CARRIER_KEYS.issubset(value)


def _bind(sample: Sample) -> TraceHandle:
    carrier: Any = getattr(sample, "trace", None)
    if not _is_carrier(carrier):
        carrier = {
            "version": VERSION,
            "trace_id": f"{_ids.getrandbits(128):032x}",
            "sample_id": getattr(sample, "index", None),
            "group_id": getattr(sample, "group_index", None),
            "attempt": 0,
            "events": [],
        }
        sample.trace = carrier
    return TraceHandle(carrier)


_ids = random.Random()  # not the process's own generator, which users seed
os.register_at_fork(after_in_child=_ids.seed)


def _new_span_id() -> str:
    """Return 16 random digits. The system's generator would release the interpreter lock, and wait to get it back."""
    return f"{_ids.getrandbits(64):016x}"


def _handles(target: Target) -> list[TraceHandle]:
    return _handles_of(target) if _enabled() else []


def _handles_of(target: Target) -> list[TraceHandle]:
    if target is None:
        return []
    if isinstance(target, TraceHandle):
        return [target]
    if isinstance(target, (list, tuple)):
        return [handle for item in target for handle in _handles_of(item)]
    if isinstance(target, Mapping):
        return [TraceHandle(target)] if _is_carrier(target) else []  # type: ignore[arg-type]
    with _harmless("bind_trace"):
        return [_bind(target)]
    return []


def _parent(handle: TraceHandle) -> str | None:
    return _parents.get().get(handle.carrier["trace_id"]) or handle.parent_span_id


def _append(
    handle: TraceHandle,
    kind: str,
    name: str,
    ts: float,
    span_id: str | None,
    parent: str | None,
    attrs: Mapping[str, Any] | None,
) -> None:
    carrier = handle.carrier
    about = carrier.get
    event = {
        "type": kind, "name": name, "ts": ts, "trace_id": about("trace_id"), "sample_id": about("sample_id"),
        "group_id": about("group_id"), "attempt": about("attempt"),
    }  # fmt: skip
    if span_id:
        event["span_id"] = span_id
    if parent:
        event["parent_span_id"] = parent
    if attrs:
        event["attrs"] = dict(attrs)
    carrier["events"].append(event)


def _close(span: Span) -> None:
    now = time.time()
    attrs = dict(span.attrs)
    children = attrs.pop(TRACE_CHILDREN_KEY, None) or ()
    for handle, span_id in span.ids:
        for child in children:
            child_id = _new_span_id()
            _append(handle, "span_start", child["name"], child["start"], child_id, span_id, child.get("attrs"))
            _append(handle, "span_end", child["name"], child["end"], child_id, span_id, None)
        _append(handle, "span_end", span.name, now, span_id, _parent(handle), attrs)


class _harmless:
    """Log a failure of the tracer, once per kind, in place of raising it."""

    __slots__ = ("where",)

    def __init__(self, where: str) -> None:
        self.where = where

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        what = f"{self.where}: {type(error).__name__}"
        if what not in _complained:
            _complained.add(what)
            logger.warning("tracing failed in %s and is skipped: %s", self.where, error, exc_info=error)
        return True
