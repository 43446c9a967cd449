"""OpenTelemetry spans of operations and their phases."""

from __future__ import annotations

import httpx
import pytest

from tests.waiting import wait_until

trace = pytest.importorskip("opentelemetry.trace")
sdk = pytest.importorskip("opentelemetry.sdk.trace")
export = pytest.importorskip("opentelemetry.sdk.trace.export")
in_memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")


def test_spans_follow_the_phases(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = in_memory.InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    answer = http.post("/release_memory_occupation").json()
    http.post("/resume_memory_occupation")
    wait_until(lambda: "memsaver.resume" in [span.name for span in exporter.get_finished_spans()])
    spans = {span.name: span for span in exporter.get_finished_spans()}
    whole = spans["memsaver.release"]
    assert whole.attributes["memsaver.operation_id"] == answer["operation_id"]
    assert whole.attributes["memsaver.released_bytes"] == answer["released_bytes"]
    ends = whole.start_time
    for phase in answer["phases"]:
        span = spans[f"memsaver.release.{phase['name']}"]
        assert span.parent.span_id == whole.context.span_id
        assert ends <= span.start_time <= span.end_time
        ends = span.start_time
    assert {"memsaver.resume", "memsaver.resume.restore", "memsaver.resume.repair"} <= set(spans)
