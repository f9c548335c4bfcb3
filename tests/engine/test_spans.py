"""OpenTelemetry spans, as an exporter gets them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from nnsight_async import VLLM, RunCancelledError
from nnsight_async.testing.engine import drained
from tests.conftest import LONG
from tests.engine.borrowed import borrowed

PROMPT = [5, 17, 101]
STEPS = 4
SAMPLING: dict[str, Any] = {"max_tokens": STEPS, "ignore_eos": True}
LOGITS = 512 * 4  # bytes in a step


class Exported:
    """A provider of spans, and those of them that have ended."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def runs(self) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == "nnsight_async.run"]

    def only(self) -> ReadableSpan:
        (span,) = self.runs()
        return span


@pytest.fixture
def exported() -> Iterator[Exported]:
    exported = Exported()
    yield exported
    exported.provider.shutdown()


def read_logits(model: Any, tracer: Any) -> None:
    for _ in tracer.iter[:]:
        tracer.save(model.logits, "logits")


def fail_in_step_2(model: Any, tracer: Any) -> None:
    for step in tracer.iter[:]:
        if step == 2:
            raise ZeroDivisionError("the user's own")


async def test_a_run_is_a_span_below_its_callers(model: VLLM, exported: Exported) -> None:
    traced = borrowed(model, spans=exported.provider, served_model_name="tiny")
    tracer = exported.provider.get_tracer("application")
    with tracer.start_as_current_span("request") as above:
        async with traced.run(PROMPT, read_logits, **SAMPLING) as run:
            await run.result

    span = exported.only()
    assert span.parent is not None
    assert span.parent.span_id == above.get_span_context().span_id
    assert span.context.trace_id == above.get_span_context().trace_id
    assert span.status.status_code is StatusCode.UNSET
    assert dict(span.attributes or {}) == {
        "gen_ai.request.model": "tiny",
        "gen_ai.usage.input_tokens": len(PROMPT),
        "gen_ai.usage.output_tokens": STEPS,
        "nnsight_async.run": run._job.key,
        "nnsight_async.invoke": 0,
        "nnsight_async.sequence": 0,
        "nnsight_async.steps": STEPS,
        "nnsight_async.bytes": STEPS * LOGITS,
        "nnsight_async.outcome": "finished",
    }


async def test_the_span_of_a_run_that_fails(model: VLLM, exported: Exported) -> None:
    traced = borrowed(model, spans=exported.provider)
    with pytest.raises(ZeroDivisionError):
        await traced.run(PROMPT, fail_in_step_2, **SAMPLING)

    span = exported.only()
    assert span.attributes is not None
    assert span.parent is None
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "ZeroDivisionError")
    assert span.attributes["nnsight_async.outcome"] == "failed"
    assert span.attributes["error.type"] == "ZeroDivisionError"
    (event,) = span.events
    assert event.attributes is not None
    assert event.attributes["exception.type"] == "ZeroDivisionError"
    assert "fail_in_step_2" in str(event.attributes["exception.stacktrace"])


async def test_the_span_of_a_run_that_is_cancelled(model: VLLM, exported: Exported) -> None:
    traced = borrowed(model, spans=exported.provider)
    async with traced.run(PROMPT, read_logits, **LONG) as run:
        await anext(run.stream())
    with pytest.raises(RunCancelledError):
        await run.result

    span = exported.only()
    assert span.attributes is not None
    assert span.attributes["nnsight_async.outcome"] == "cancelled"
    assert span.status.status_code is StatusCode.UNSET
    assert not span.events
    await drained(model)


async def test_a_processor_that_fails_harms_no_run(model: VLLM, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(SimpleSpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            raise OSError("on purpose")

    provider = TracerProvider()
    provider.add_span_processor(Failing(InMemorySpanExporter()))
    traced = borrowed(model, spans=provider)
    (output,) = await traced.generate(PROMPT, **SAMPLING)
    assert len(output.outputs[0].token_ids) == STEPS
    assert "could not be ended" in caplog.text
    await drained(model)


async def test_each_prompt_of_a_trace_and_each_plain_request_has_a_span(model: VLLM, exported: Exported) -> None:
    traced = borrowed(model, spans=exported.provider)
    async with traced.trace(**SAMPLING) as tracer:
        with tracer.invoke(PROMPT):
            traced.logits.save()
        with tracer.invoke([*PROMPT, 9]):
            traced.logits.save()
    await tracer.result
    await traced.generate(PROMPT, **SAMPLING)

    found = [span.attributes for span in exported.runs()]
    assert sorted(attributes["nnsight_async.invoke"] for attributes in found if attributes) == [0, 0, 1]
    assert sorted(attributes["gen_ai.usage.input_tokens"] for attributes in found if attributes) == [3, 3, 4]
    assert sorted(attributes["nnsight_async.bytes"] for attributes in found if attributes) == [0, LOGITS, LOGITS]


EXPORTING = """
import asyncio
from opentelemetry import trace
from nnsight_async import VLLM
from nnsight_async.testing.engine import tiny_engine_args

def read_logits(model, tracer):
    tracer.save(model.logits, "logits")

async def main():
    async with VLLM({llama!r}, mode="async", otlp_traces_endpoint={endpoint!r}, **tiny_engine_args()) as model:
        await model.run([5, 17, 101], read_logits, max_tokens=2, ignore_eos=True)
        await model.generate([5, 17, 101], max_tokens=2, ignore_eos=True)
    assert trace.get_tracer_provider().force_flush()

if __name__ == "__main__":
    asyncio.run(main())
"""


class Receiver(BaseHTTPRequestHandler):
    """Takes in what exporters of OTLP send."""

    spans: ClassVar[list[Any]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.spans.extend(span for scope in resource.scope_spans for span in scope.spans)
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


@pytest.mark.slow
def test_the_span_of_vllm_is_below_ours(llama: str, tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        script = tmp_path / "script.py"
        script.write_text(EXPORTING.format(llama=llama, endpoint=f"http://127.0.0.1:{server.server_port}/v1/traces"))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        environment["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = "http/protobuf"
        ended = subprocess.run(
            [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        server.shutdown()
    assert ended.returncode == 0, ended.stderr

    ours = {span.span_id for span in Receiver.spans if span.name == "nnsight_async.run"}
    assert len(ours) == 2
    assert {span.parent_span_id for span in Receiver.spans if span.name == "llm_request"} == ours


def test_vllms_spans_without_its_statistics_are_refused(llama: str) -> None:
    with pytest.raises(ValueError, match="leave disable_log_stats out"):
        VLLM(llama, mode="async", otlp_traces_endpoint="http://localhost:4317", disable_log_stats=True)


async def test_there_are_none_unless_asked_for(model: VLLM, llama: str) -> None:
    assert borrowed(model)._spans is None
    assert VLLM(llama, mode="async", spans=False, otlp_traces_endpoint="http://localhost:4317")._spans is None
    assert VLLM(llama, mode="async", otlp_traces_endpoint="http://localhost:4317")._spans is not None
