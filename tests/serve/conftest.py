"""Servers on the engine that all tests share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nnsight_async import VLLM
from nnsight_async.serve import access
from nnsight_async.serve.policy import ServerLimits
from nnsight_async.serve.server import Server

KEYS = {
    "ann": {"key": "the-key-of-ann", "scopes": ["trace", "edit"]},
    "ben": {"key": "the-key-of-ben", "scopes": ["trace", "edit", "python"]},
    "eve": {"key": "the-key-of-eve", "scopes": ["trace"]},
    "root": {"key": "the-key-of-root", "scopes": ["trace", "edit", "python", "admin"]},
}
LIMITS = ServerLimits(body=1 << 20, runs=8, head_seconds=60.0, beat=0.2, edits=2, uploads=5 << 19, block_bytes=1 << 28)


def key(name: str) -> str:
    return KEYS[name]["key"]


@pytest.fixture(scope="session")
def open_server(vllm_model: VLLM) -> Iterator[Server]:
    """For whoever is on this machine, blocks of Python too."""
    with Server(vllm_model, allow_python=True) as server:
        yield server


@pytest.fixture(scope="session")
def data_server(vllm_model: VLLM) -> Iterator[Server]:
    """Takes blocks of declared operations alone."""
    with Server(vllm_model) as server:
        yield server


@pytest.fixture(scope="session")
def guarded_server(vllm_model: VLLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With keys of several scopes, and small limits."""
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    file.write_text(json.dumps(KEYS))
    with Server(vllm_model, allow_python=True, keys=access.from_file(Path(file)), limits=LIMITS) as server:
        yield server


@pytest.fixture(scope="session")
def client(data_server: Server, llama: str) -> Iterator[Any]:
    """A model of a client, on the server that takes no Python."""
    with VLLM(llama, mode="async", serve=data_server.url, rename={"self_attn": "attention"}) as model:
        yield model
