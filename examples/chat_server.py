"""A chat endpoint that streams text with the score of a linear probe beside each token, and ends where it goes too far.

    curl -N localhost:8000/chat -H 'content-type: application/json' -d '{"message": "Tell me of rain.", "limit": 2.5}'

The answer is a stream of server-sent events. A client that goes away aborts its request, and nobody else's.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from launch import launch
from pydantic import BaseModel
from stopping_probe import Probe, fitted


class Message(BaseModel):
    message: str
    max_tokens: int = 64
    temperature: float = 0.0
    limit: float = float("inf")


def application(model: Any, probe: Probe) -> FastAPI:
    """The endpoint `POST /chat`."""
    app = FastAPI()

    @app.post("/chat")
    async def chat(message: Message) -> StreamingResponse:
        try:
            tracer = await begin(model, probe, message)
        except ValueError as error:  # vLLM's own words about a bad temperature, for example
            raise HTTPException(422, str(error)) from error
        return StreamingResponse(events(tracer), media_type="text/event-stream")

    return app


async def begin(model: Any, probe: Probe, message: Message) -> Any:
    """Submit the chat; its block scores every step, and stops where the score is above the limit."""
    messages, limit = [{"role": "user", "content": message.message}], message.limit
    sampling = {"max_tokens": message.max_tokens, "temperature": message.temperature}

    async with model.trace(messages, **sampling) as tracer:
        for _ in tracer.iter[:]:
            stream = model.model.layers[probe.layer].resid_post[-1].float()
            score = (stream @ probe.weight + probe.bias).item().save()
            if score > limit:
                tracer.stop()
    return tracer


async def events(tracer: Any) -> AsyncIterator[str]:
    """Each token as an event. The `async with` aborts the request when the client has gone."""
    async with tracer.stream() as tokens:
        async for token in tokens:
            event = {"text": token.text, "score": token.saves["score"], "finish_reason": token.finish_reason}
            yield f"data: {json.dumps(event)}\n\n"


async def main(model: Any, host: str = "127.0.0.1", port: int = 8000) -> None:
    probe = await fitted(model, len(model.model.layers) // 2)
    await uvicorn.Server(uvicorn.Config(application(model, probe), host=host, port=port)).serve()


if __name__ == "__main__":
    launch(main, __doc__)
