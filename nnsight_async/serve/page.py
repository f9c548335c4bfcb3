"""The page at `/`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import Response

HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def page() -> APIRouter:
    """The page and its script, which are the same whatever the model is."""
    routes = APIRouter(include_in_schema=False)

    @routes.get("/")
    async def document() -> Response:  # pyright: ignore[reportUnusedFunction]
        return Response(_file("page.html"), media_type="text/html; charset=utf-8", headers=HEADERS)

    @routes.get("/page.js")
    async def script() -> Response:  # pyright: ignore[reportUnusedFunction]
        return Response(_file("page.js"), media_type="text/javascript; charset=utf-8", headers=HEADERS)

    return routes


@cache
def _file(name: str) -> bytes:
    return (Path(__file__).parent / name).read_bytes()
