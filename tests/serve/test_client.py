"""What needs no engine: names, keys, options, and a client without vLLM."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nnsight_async import NNsightError
from nnsight_async.runs.keywords import OTHERS, PLAIN
from nnsight_async.serve import access
from nnsight_async.serve.params import request_of
from nnsight_async.serve.uploads import Uploads

WITHOUT_VLLM = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("vllm", "fastapi", "uvicorn"):
            raise ModuleNotFoundError(f"{name} is not installed", name=name)
sys.meta_path.insert(0, Blocked())
import importlib.util
importlib.util.find_spec = (lambda find: lambda name, *more: None if name == "vllm" else find(name, *more))(
    importlib.util.find_spec)
import nnsight_async
model = nnsight_async.VLLM("some/repo")
try:
    model.model
except nnsight_async.ServerError as error:
    print(error)
with_server = nnsight_async.VLLM("some/repo", mode="async", serve="http://127.0.0.1:9", api_key="secret")
try:
    with_server.trace("hello", temprature=1)
except TypeError as error:
    print(error)
with_server.close()
assert not [name for name in sys.modules if name.partition(".")[0] in ("vllm", "fastapi", "uvicorn")]
import torch
assert not torch.distributed.is_initialized()
"""


def test_a_client_needs_no_vllm() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NNSIGHT_")}
    told = subprocess.run(
        [sys.executable, "-c", WITHOUT_VLLM], capture_output=True, text=True, env=environment, timeout=500
    )
    assert told.returncode == 0, told.stderr
    assert "give serve='http://HOST:PORT', or set NNSIGHT_SERVE" in told.stdout
    assert "did you mean 'temperature'" in told.stdout


def test_the_names_of_sampling_parameters_are_those_of_vllm() -> None:
    from vllm import SamplingParams

    names = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    assert names >= PLAIN
    assert names <= PLAIN | OTHERS


def test_one_setting_under_two_names() -> None:
    with pytest.raises(TypeError, match=r"run\(\) got both max_tokens= and max_new_tokens="):
        request_of({"max_new_tokens": 3, "max_tokens": 3}, "run()")
    assert request_of({"max_new_tokens": 3}, "run()").params.sampling() == {"max_tokens": 3}


# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "no JSON"),
        ("[]", "an object is expected"),
        ("{}", "an object is expected"),
        ('{"a": 1}', "'a' is an object"),
        ('{"a": {"key": "long enough", "scope": []}}', "'a' is an object"),
        ('{"a": {"key": "short"}}', "at least 8"),
        ('{"a": {"key": " with spaces "}}', "no space"),
        ('{"a": {"scopes": ["trace"]}}', "either a key or its sha256"),
        ('{"a": {"key": "long enough", "sha256": "00"}}', "either a key or its sha256"),
        ('{"a": {"sha256": "xx"}}', "64 hexadecimal"),
        (json.dumps({"a": {"sha256": hashlib.sha256(b"").hexdigest()}}), "no key at all"),
        ('{"a": {"key": "long enough", "scopes": ["all"]}}', "trace, edit, python, admin"),
        ('{"a": {"key": "long enough"}, "b": {"key": "long enough"}}', "equal"),
    ],
)
def test_a_key_file_says_what_is_wrong_with_it(tmp_path: Path, content: str, why: str) -> None:
    file = tmp_path / "keys.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=why):
        access.from_file(file)


def test_keys_are_found_by_their_content(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    digest = hashlib.sha256(b"the second one").hexdigest()
    file.write_text(json.dumps({"a": {"key": "the first one", "scopes": ["edit"]}, "b": {"sha256": digest}}))
    keys = access.from_file(file)
    found = {name: keys.find(f"Bearer {name}") for name in ("the first one", "the second one", "the third one")}
    assert [key and (key.name, sorted(key.scopes)) for key in found.values()] == [
        ("a", ["edit"]),
        ("b", ["trace"]),
        None,
    ]
    assert keys.find("bearer the first one") is not None
    assert keys.find(None) is None
    assert "first" not in repr(keys.find("Bearer the first one"))


@pytest.mark.parametrize(
    ("names", "headers", "status"),
    [
        (access.LOOPBACK, {"host": "127.0.0.1:6677"}, 200),
        (access.LOOPBACK, {"host": "localhost"}, 200),
        (access.LOOPBACK, {"host": "[::1]:6677"}, 200),
        (access.LOOPBACK, {"host": "localhost:1", "origin": "http://localhost:1"}, 200),
        (access.LOOPBACK, {"host": "rebound.example:6677"}, 403),
        (access.LOOPBACK, {"host": "127.0.0.1.example"}, 403),
        (access.LOOPBACK, {}, 403),
        (None, {"host": "10.1.2.3:6677"}, 200),
        (None, {"host": "10.1.2.3:6677", "origin": "http://other.example"}, 403),
        (None, {"host": "10.1.2.3:6677", "origin": "null"}, 403),
    ],
)
async def test_without_keys_pages_of_others_are_kept_out(names: Any, headers: dict[str, str], status: int) -> None:
    answered: list[int] = []

    async def behind(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Any:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            answered.append(message["status"])

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "path": "/nnsight/v1/runs", "headers": raw}
    await access.Gate(behind, access.Keys([]), names, Uploads(1000))(scope, receive, send)
    assert answered == [status]


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parsed() -> Any:
    from nnsight_async.serve import cli

    parser = cli.make_parser()
    defaults = parser.parse_args([])

    def parse(*arguments: str) -> Any:
        args = parser.parse_args(list(arguments))
        return args, cli.check(args, defaults), defaults

    return parse


@pytest.fixture(autouse=True)
def no_key_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NNSIGHT_API_KEY", "NNSIGHT_SERVE", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def test_options_of_vllm_go_to_its_engine(parsed: Any, tmp_path: Path) -> None:
    from nnsight_async.serve import frontend

    config = tmp_path / "config.yaml"
    config.write_text("max-model-len: 512\nport: 7000\n")
    args, keys, defaults = parsed(
        "some/repo", "-tp", "2", "--no-enable-prefix-caching", "--dtype", "float32", "--config", str(config)
    )
    assert not keys
    assert (args.model_tag, args.host, args.port) == ("some/repo", "127.0.0.1", 7000)
    assert frontend.engine_args(args, defaults) == {
        "tensor_parallel_size": 2, "enable_prefix_caching": False, "dtype": "float32", "max_model_len": 512,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "which model"),
        (["x", "--host", "0.0.0.0"], "there is no key"),
        (["x", "--headless"], "one process"),
        (["x", "--api-server-count", "2"], "one process"),
        (["x", "--allowed-origins", '["*"]'], "pages of other servers"),
        (["x", "--api-key", "first-key", "second-key"], "--key-file"),
        (["x", "--api-key", "short"], "at least 8"),
    ],
)
def test_what_does_not_go_is_refused_with_a_reason(parsed: Any, arguments: list[str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parsed(*arguments)


def test_taps_are_those_that_were_given(parsed: Any) -> None:
    args, _, _ = parsed("x", "--tap", "model.layers.3.output", "--tap", "model.layers[*].mlp")
    assert args.tap == ["model.layers.3.output", "model.layers[*].mlp"]


def test_where_a_key_comes_from(parsed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parsed("x", "--host", "0.0.0.0", "--api-key", "a-good-key")[1].find("Bearer a-good-key").may("admin")
    assert not parsed("x", "--host", "0.0.0.0", "--without-key-off-loopback")[1]
    monkeypatch.setenv("NNSIGHT_API_KEY", "from-the-environment")
    assert parsed("x", "--host", "0.0.0.0")[1].find("Bearer from-the-environment") is not None


def test_every_error_of_ours_can_come_from_a_server() -> None:
    import nnsight_async
    from nnsight_async.runs.carried import known

    ours = [getattr(nnsight_async, name) for name in nnsight_async.__all__ if name.endswith("Error")]
    assert all(issubclass(kind, NNsightError) and kind in known().values() for kind in ours)


@pytest.mark.parametrize("option", ["--ssl-keyfile", "--ssl-ca-certs"])
def test_tls_without_a_certificate_is_not_served_as_none(parsed: Any, option: str) -> None:
    with pytest.raises(ValueError, match="--ssl-certfile"):
        parsed("MODEL", option, "a.pem")


def test_limits_that_are_not_given_are_those_of_the_docs(parsed: Any) -> None:
    args, _, _ = parsed("MODEL")
    assert (args.max_runs, args.max_run_seconds) == (256, 3600)
    assert (args.max_body_bytes, args.max_save_bytes) == (64 << 20, 256 << 20)
    assert (args.max_upload_bytes, args.max_block_bytes, args.max_all_block_bytes) == (1 << 30, 1 << 30, 4 << 30)


def test_limits_that_are_given_are_the_servers(parsed: Any) -> None:
    from nnsight_async.serve.cli import limits_of

    args, _, _ = parsed("MODEL", "--max-upload-bytes", "5", "--max-block-bytes", "6", "--max-all-block-bytes", "7")
    limits = limits_of(args)
    assert (limits.uploads, *limits.room) == (5, 6, 7)
