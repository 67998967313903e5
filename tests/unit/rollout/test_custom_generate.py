"""The trace of a sample whose plain generate function returns another one."""

from __future__ import annotations

from typing import Any

import pytest

from slime.observability.trace_utils import trace_event, trace_span
from slime.rollout.sglang_rollout import call_generate
from slime.utils.types import Sample


def tracing_generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    trace_event(sample, "in the function")
    return sample


def replacing_generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    trace_event(sample, "in the function")
    return Sample(index=7)


@pytest.mark.parametrize("function", [tracing_generate, replacing_generate])
async def test_a_plain_generate_function_writes_into_the_trace_of_its_sample(function):
    """The spans that are open around it are closed in the sample's own trace, whatever the function returns."""
    sample = Sample(index=1)
    with trace_span(sample, "around it"):
        trace = sample.trace
        await call_generate(function, None, sample, {}, evaluation=False)
        assert sample.trace is trace
    assert [(event["type"], event["name"]) for event in trace["events"]] == [
        ("span_start", "around it"), ("event", "in the function"), ("span_end", "around it"),
    ]  # fmt: skip
