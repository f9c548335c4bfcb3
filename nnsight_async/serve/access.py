"""Who may do what: keys, their scopes, and which paths ask for which."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import msgspec

from nnsight_async.serve.messages import Refusal, Scope
from nnsight_async.serve.uploads import Refused, Upload, Uploads

SCOPES: tuple[Scope, ...] = get_args(Scope)
LOOPBACK = frozenset(("127.0.0.1", "localhost", "::1"))

DROPPED, DROPPING = 16 << 20, 5.0
"""Bytes and seconds that what is sent after a refusal may go on."""

OPEN = frozenset(("/", "/page.js", "/health"))
"""Paths that ask for no key: the page, which has nothing of the model in it, and whether the server is there."""

OURS = "/nnsight/v1"

INFERENCE = (
    OURS,
    "/v1/models",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/tokenize",
    "/detokenize",
    "/version",
    "/metrics",
    "/openapi.json",
    "/docs",
)
"""What the scope `trace` is for. Every other path of vLLM's, known or not, asks for `admin`."""


@dataclass(frozen=True, slots=True)
class Key:
    """One who may use the server, by a name that logs and errors can say."""

    name: str
    scopes: frozenset[Scope]
    digest: bytes = b""
    """SHA-256 of the key itself, which is not kept."""

    def may(self, scope: Scope) -> bool:
        return scope in self.scopes


ANYONE = Key("anyone", frozenset(SCOPES))


class Keys:
    """The keys of a server; without any, everybody may do everything."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self._keys = tuple(keys)
        if len({key.digest for key in keys}) < len(keys) or len({key.name for key in keys}) < len(keys):
            raise ValueError("two keys are equal, or have the same name")

    def __bool__(self) -> bool:
        return bool(self._keys)

    def find(self, authorization: str | None) -> Key | None:
        """Whose key an `Authorization` header has. It takes as long whichever it is, or whether it is any."""
        if not self._keys:
            return ANYONE
        scheme, _, given = (authorization or "").partition(" ")
        digest = _digest(given.strip() if scheme.lower() == "bearer" else "")
        found = [key for key in self._keys if hmac.compare_digest(key.digest, digest)]
        return found[0] if found else None


def single(key: str) -> Keys:
    """One key, for everything."""
    return Keys([Key("key", frozenset(SCOPES), _digest(_checked(key, "the key")))])


def from_file(path: Path) -> Keys:
    """The keys of a JSON file: `{"name": {"key": "...", "scopes": ["trace", "edit"]}, ...}`.

    Instead of `key` a `sha256`, in hexadecimal, keeps the key itself out of the file. Raises `ValueError`.
    """
    try:
        content: Any = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: no JSON: {error}") from None
    if not isinstance(content, dict) or not content:
        raise ValueError(f'{path}: an object is expected, {{"NAME": {{"key": "...", "scopes": ["trace"]}}}}')
    return Keys([_key(path, name, entry) for name, entry in cast("Mapping[str, Any]", content).items()])


def _key(path: Path, name: str, entry: Any) -> Key:
    known = {"key", "sha256", "scopes"}
    if not isinstance(entry, dict) or cast("dict[str, Any]", entry).keys() - known:
        raise ValueError(f"{path}: {name!r} is an object with {', '.join(sorted(known))}")
    given = cast("dict[str, Any]", entry)
    scopes = given.get("scopes", ["trace"])
    if not isinstance(scopes, list) or not set(cast("list[Any]", scopes)) <= set(SCOPES):
        raise ValueError(f"{path}: the scopes of {name!r} are some of {', '.join(SCOPES)}, not {scopes!r}")
    if ("key" in given) == ("sha256" in given):
        raise ValueError(f"{path}: {name!r} has either a key or its sha256")
    digest = (
        _digest(_checked(given["key"], repr(name))) if "key" in given else _hexadecimal(path, name, given["sha256"])
    )
    return Key(name, frozenset(cast("Iterable[Scope]", scopes)), digest)


def _hexadecimal(path: Path, name: str, text: Any) -> bytes:
    try:
        digest = bytes.fromhex(text)
    except (TypeError, ValueError):
        digest = b""
    if len(digest) != 32:
        raise ValueError(f"{path}: the sha256 of {name!r} is 64 hexadecimal digits")
    if digest == _digest(""):
        raise ValueError(f"{path}: the sha256 of {name!r} is that of no key at all, which everybody has")
    return digest


def _checked(key: Any, whose: str) -> str:
    if not isinstance(key, str) or len(key) < 8 or key != key.strip() or not key.isascii() or not key.isprintable():
        raise ValueError(f"{whose}: a key is at least 8 printable ASCII characters, with no space around them")
    return key


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()


def scope_of(path: str) -> Scope | None:
    """The scope that a path asks for; None for none. Routes of ours may ask for more."""
    if path in OPEN:
        return None
    inference = any(path == known or path.startswith(f"{known}/") for known in INFERENCE)
    return "trace" if inference else "admin"


class Gate:
    """The outermost middleware: nothing behind it is reached without a key that may.

    Without keys, requests from pages of other servers are refused, and under other names of this host than `names`, if
    those are given: a page from anywhere could send them to who looks at it (requests across origins, DNS rebinding).
    """

    def __init__(
        self, app: Any, keys: Keys, names: frozenset[str] | None, uploads: Uploads, body: int | None = None
    ) -> None:
        self._app = app
        self._keys = keys
        self._names = names
        self._uploads = uploads
        self._body = body
        """Bytes that vLLM's routes, which know no limit, may be sent."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        refused = self._refused(scope, headers)
        if refused is None and scope["type"] == "http":
            await self._through(scope, receive, send, headers)
        elif refused is None:  # websockets: vLLM's realtime API, which edits and limits know nothing of
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] == "http":
            await _read_on(receive)
            await _answer(send, *refused)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _through(self, scope: Any, receive: Any, send: Any, headers: Mapping[str, str]) -> None:
        key: Key | None = scope.get("state", {}).get("key")
        if key is None:  # where there is nothing to be sent
            await self._app(scope, receive, send)
            return
        most = None if scope["path"].startswith(OURS) else self._body  # ours answer what is too long themselves
        await self._uploads.wait(key.name, _announced(headers))
        try:
            upload = Upload(receive, send, self._uploads, key.name, _announced(headers), most)
        except Refused as error:
            await _read_on(receive)
            await _answer(send, error.status, error.message)
            return
        try:
            await self._app(scope, upload.receive, upload.send)
        finally:
            upload.end()

    def _refused(self, scope: Any, headers: Mapping[str, str]) -> tuple[int, str] | None:
        if not self._keys and (reason := _foreign(headers, self._names)):
            return 403, reason
        path: str = scope["path"]
        needed = scope_of(path)
        key = self._keys.find(headers.get("authorization"))
        if needed is None:
            return None
        if key is None:
            return 401, "this server asks for a key: give api_key=, or the header `Authorization: Bearer KEY`"
        if not key.may(needed):
            return 403, f"the key {key.name!r} has not the scope {needed!r}, which {path[:100]} asks for"
        if self._body is not None and _announced(headers) > self._body:
            return 413, f"a request of more than {self._body:,} bytes"
        scope.setdefault("state", {})["key"] = key
        return None


def _announced(headers: Mapping[str, str]) -> int:
    """How long a body is said to be."""
    length = headers.get("content-length", "")
    return int(length[:20]) if length.isdecimal() else 0


def _foreign(headers: Mapping[str, str], names: frozenset[str] | None) -> str:
    """Why a request may come from a page of somebody else's; empty if it does not."""
    host = headers.get("host", "")
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    if names is not None and name.strip("[]") not in names:
        return f"this server without keys is asked for by the names of this machine, not as {host[:100]!r}"
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != host:
        return "this server without keys takes no requests from pages of other servers"
    return ""


async def _read_on(receive: Any) -> None:
    """Drop what is still sent of a refused request: a connection that is closed before takes the answer with it."""
    left = DROPPED
    with suppress(TimeoutError):
        async with asyncio.timeout(DROPPING):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if not message.get("more_body"):
                    return


async def _answer(send: Any, status: int, message: str) -> None:
    kind = {413: "ValueError", 429: "ServerError"}.get(status, "PermissionError")
    body = msgspec.json.encode({"error": Refusal(kind, message)})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers.append((b"connection", b"close"))  # what is still sent is not read
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
