"""OpenTelemetry spans of runs."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from nnsight_async.runs.facts import facts

if TYPE_CHECKING:
    from opentelemetry.trace import Span, TracerProvider

    from nnsight_async.runs.run import Run

log = logging.getLogger(__name__)

NAME = "nnsight_async.run"

PLAIN = ("run", "invoke", "sequence", "outcome")
"""The facts that are attributes, as `nnsight_async.*`."""


class Spans:
    """Begins a span for each run, in the context of who starts it, and ends it with the run.

    With `linked`, vLLM's own span of the request becomes its child.
    """

    def __init__(self, model: str, provider: TracerProvider | None, *, linked: bool) -> None:
        try:
            from opentelemetry import trace
        except ImportError:
            raise ImportError("spans need the package opentelemetry-api: pip install opentelemetry-api") from None

        self._tracer = trace.get_tracer("nnsight_async", tracer_provider=provider)
        self._model = model
        self._linked = linked

    def begin(self, run: Run) -> None:
        """`run` is about to start."""
        span = self._tracer.start_span(NAME, attributes={"gen_ai.request.model": self._model})
        if self._linked:
            run.request.trace_headers = _headers(span)
        run.before_end = lambda: _ended(span, run)


def spans_of(asked: bool | TracerProvider | None, model: str, endpoint: str | None) -> Spans | None:
    """What `VLLM(spans=...)` asks for; None has spans where vLLM has them, and so has an `otlp_traces_endpoint`."""
    if asked is False or (asked is None and not endpoint):
        return None
    return Spans(model, None if asked is None or asked is True else asked, linked=bool(endpoint))


def _headers(span: Span) -> dict[str, str]:
    from opentelemetry.trace import set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers, set_span_in_context(span))
    return headers


def _ended(span: Span, run: Run) -> None:
    try:
        _end(span, run)
    except Exception:  # of a processor of the application's: the run ends all the same
        log.exception("the span of run %d could not be ended", run.key)


def _end(span: Span, run: Run) -> None:
    from opentelemetry.trace import Status, StatusCode

    told = facts(run)
    span.set_attributes({f"nnsight_async.{name}": told[name] for name in PLAIN} | _sizes(run))
    if run.error is not None and told["outcome"] == "failed":
        span.record_exception(run.error)
        span.set_status(Status(StatusCode.ERROR, told["error"]))
        span.set_attribute("error.type", told["error"])
    span.end()


def _sizes(run: Run) -> dict[str, Any]:
    prompt = getattr(run.output, "prompt_token_ids", None)
    return {
        "gen_ai.usage.input_tokens": len(prompt or ()),
        "gen_ai.usage.output_tokens": len(run.tokens),
        "nnsight_async.steps": run.ledger.through + 1,
        "nnsight_async.bytes": run.ledger.bytes,
    }
