"""Spans nest, survive transport, note failures and never raise into user code."""

from __future__ import annotations

import asyncio
import json
import types

import pytest

from slime.observability import trace_utils as tu


def sample(**fields):
    return types.SimpleNamespace(index=5, group_index=1, **fields)


def events(s):
    return s.trace["events"]


def test_spans_nest_and_carry_identity():
    s = sample()
    with tu.trace_span(s, "outer", {"n": 1}):
        with tu.trace_span(s, "inner") as span:
            span.update({"tokens": 3})
        tu.trace_event(s, "note")
    kinds = [(e["type"], e["name"]) for e in events(s)]
    assert kinds == [
        ("span_start", "outer"), ("span_start", "inner"), ("span_end", "inner"), ("event", "note"),
        ("span_end", "outer"),
    ]  # fmt: skip
    outer, inner, inner_end, note, outer_end = events(s)
    assert inner["parent_span_id"] == note["parent_span_id"] == outer["span_id"]
    assert "parent_span_id" not in outer
    assert outer_end["span_id"] == outer["span_id"]
    assert outer["attrs"] == {"n": 1}
    assert inner_end["attrs"] == {"tokens": 3}
    assert {(e["sample_id"], e["group_id"], e["attempt"]) for e in events(s)} == {(5, 1, 0)}
    json.dumps(s.trace)


def test_concurrent_tasks_do_not_mix_parents():
    async def work(s):
        with tu.trace_span(s, "outer"):
            await asyncio.sleep(0.001)
            with tu.trace_span(s, "inner"):
                await asyncio.sleep(0.001)

    async def both():
        samples = [sample(), sample()]
        await asyncio.gather(*(work(s) for s in samples))
        return samples

    for s in asyncio.run(both()):
        starts = {e["name"]: e for e in events(s) if e["type"] == "span_start"}
        assert starts["inner"]["parent_span_id"] == starts["outer"]["span_id"]


def test_errors_pass_through_and_are_noted():
    s = sample()
    with pytest.raises(ZeroDivisionError), tu.trace_span(s, "bad"):
        raise ZeroDivisionError("division by zero")
    assert events(s)[-1]["attrs"] == {"error_type": "ZeroDivisionError", "error_message": "division by zero"}


def test_tracing_never_raises():
    class Frozen:
        __slots__ = ()

    with tu.trace_span(Frozen(), "no room for a trace"):
        done = True
    tu.trace_event(Frozen(), "x")
    tu.trace_next_attempt(object())
    assert tu.bind_trace_carrier(Frozen(), "nonsense") is None
    assert tu.import_trace({"version": 1}) is None
    assert tu.build_sglang_meta_trace_attrs("nonsense") == {}
    assert done


def test_function_decorator_finds_its_target():
    @tu.trace_function("work", target="group", attrs_getter=lambda args, group: {"size": len(group)})
    async def work(args, group):
        return len(group)

    group = [sample(), sample()]
    assert asyncio.run(work(None, group=group)) == 2
    for s in group:
        assert [e["type"] for e in events(s)] == ["span_start", "span_end"]
        assert events(s)[0]["attrs"] == {"size": 2}

    @tu.trace_function("sync", target=lambda s: s, attrs_getter=lambda s: 1 / 0)
    def plain(s):
        return "result"

    assert plain(sample()) == "result"


def test_export_and_import_continue_under_the_open_span():
    s = sample()
    with tu.trace_span(s, "here"):
        exported = json.loads(json.dumps(tu.export_trace(s)))
    handle = tu.import_trace(exported)
    with tu.trace_span(handle, "there"):
        pass
    start = handle.carrier["events"][-2]
    assert (start["name"], start["parent_span_id"]) == ("there", events(s)[0]["span_id"])
    other = sample()
    tu.bind_trace_carrier(other, handle.carrier)
    assert other.trace["trace_id"] == s.trace["trace_id"]


def test_next_attempt():
    s = sample()
    tu.trace_event(s, "a")
    tu.trace_next_attempt(s)
    tu.trace_event(s, "b")
    assert [e["attempt"] for e in events(s)] == [0, 1]


def test_engine_timestamps_become_child_spans():
    s = sample()
    meta = {
        "prompt_tokens": 4, "completion_tokens": 2, "finish_reason": {"type": "stop"}, "forward_entry_time": 10.0,
        "prefill_finished_time": 11.0, "request_finished_ts": 13.0, "output_token_logprobs": [[0, 1, None]],
    }  # fmt: skip
    with tu.trace_span(s, "sglang_generate") as span:
        span.update(tu.build_sglang_meta_trace_attrs(meta))
    parent = events(s)[0]["span_id"]
    children = {(e["type"], e["name"]): e for e in events(s) if e.get("parent_span_id") == parent}
    assert children["span_start", "sglang_prefill"]["ts"] == 10.0
    assert children["span_end", "sglang_decode"]["ts"] == 13.0
    assert events(s)[-1]["attrs"] == {"prompt_tokens": 4, "completion_tokens": 2, "finish_reason": "stop"}


def test_off_switch(monkeypatch):
    monkeypatch.setenv("SLIME_TRACE", "0")
    s = sample()
    with tu.trace_span(s, "x"):
        pass
    assert not hasattr(s, "trace")
