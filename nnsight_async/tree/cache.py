"""Manifests on disk, so that the tree of a model is built once."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from nnsight_async.folders import cache_folder
from nnsight_async.tree.manifest import FORMAT, Manifest

if TYPE_CHECKING:
    from collections.abc import Mapping

DIGEST_BYTES = hashlib.sha256().digest_size
# What a model class is built from: configurations, and code of the repository's own.
SOURCES = ("*config*.json", "params.json", "*.py", "*.gguf")


def manifest_key(
    repo: str, *, vllm_version: str, layout: Mapping[str, object], revision: str | None = None
) -> str | None:
    """The name under which the manifest of a model is kept, or None if the revision cannot be told without a network.

    `layout` is whatever else the tree depends on: parallel sizes, quantisation, and so on; it must be JSON.
    """
    content = fingerprint(repo, revision)
    if content is None:
        return None
    parts = json.dumps([FORMAT, repo, content, vllm_version, layout], sort_keys=True)
    return hashlib.sha256(parts.encode()).hexdigest()


def load(key: str) -> Manifest | None:
    """The manifest kept under `key`; None if there is none, or if the file is damaged."""
    try:
        data = _file(key).read_bytes()
        digest, body = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        return Manifest.decode(body) if hashlib.sha256(body).digest() == digest else None
    except (OSError, msgspec.DecodeError):
        return None


def store(key: str, manifest: Manifest) -> None:
    """Keep `manifest` under `key`; readers see the old file or the new one, never a part. A full disk is no error."""
    body = manifest.encode()
    with suppress(OSError):
        _replace(_file(key), hashlib.sha256(body).digest() + body)


def _file(key: str) -> Path:
    return cache_folder("manifests", f"{key}.manifest")


def _replace(file: Path, data: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")
    draft = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
        draft.replace(file)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def fingerprint(repo: str, revision: str | None = None) -> str | None:
    """A name for the present content of `repo`: of a folder or file a hash, of a hub repository its cached commit."""
    local = Path(repo)
    if local.is_dir():
        return _hash_of(sorted({source for pattern in SOURCES for source in local.glob(pattern)}))
    if local.is_file():
        return _hash_of([local])
    return _commit(repo, revision or "main")


def _hash_of(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{_content(file)}\0".encode())
    return digest.hexdigest()


def _content(file: Path) -> str:
    if file.suffix == ".gguf":  # gigabytes
        state = file.stat()
        return f"{state.st_size} {state.st_mtime_ns}"
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _commit(repo: str, revision: str) -> str | None:
    if len(revision) == 40 and all(letter in "0123456789abcdef" for letter in revision):
        return revision
    reference = hub_folder(repo) / "refs" / revision
    try:
        return reference.read_text().strip() or None
    except OSError:
        return None


def hub_folder(repo: str) -> Path:
    """Where the hub's cache has what it has of a repository."""
    return _hub_cache() / f"models--{repo.replace('/', '--')}"


def _hub_cache() -> Path:
    # The rules of huggingface_hub 1.x, which takes half a second to import.
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if chosen := os.environ.get(variable):
            return Path(chosen)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("HF_HOME") or cache / "huggingface") / "hub"
