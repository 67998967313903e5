"""Old path of ``slime.observability.trace_utils``."""

from __future__ import annotations

from slime.utils.moved import moved

_HOMES = {
    "TRACE_CHILDREN_KEY": "slime.observability.trace_utils.TRACE_CHILDREN_KEY",
    "TraceHandle": "slime.observability.trace_utils.TraceHandle",
    "bind_trace": "slime.observability.trace_utils.bind_trace",
    "bind_trace_carrier": "slime.observability.trace_utils.bind_trace_carrier",
    "build_sglang_meta_trace_attrs": "slime.observability.trace_utils.build_sglang_meta_trace_attrs",
    "export_trace": "slime.observability.trace_utils.export_trace",
    "import_trace": "slime.observability.trace_utils.import_trace",
    "trace_event": "slime.observability.trace_utils.trace_event",
    "trace_function": "slime.observability.trace_utils.trace_function",
    "trace_next_attempt": "slime.observability.trace_utils.trace_next_attempt",
    "trace_span": "slime.observability.trace_utils.trace_span",
}
__all__ = list(_HOMES)
__getattr__ = moved(__name__, _HOMES)
