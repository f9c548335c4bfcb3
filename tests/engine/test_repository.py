"""Names under which there is no model are refused before anything of vLLM is imported, and say what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nnsight_async.engine.repository import check_repository

ASKED = """
import sys
from nnsight_async import VLLM
try:
    VLLM("org/name", **{keywords})
except OSError as error:
    print(error)
    print("vllm" in sys.modules)
"""


def refusal(folder: Path, keywords: str, **environment: str) -> list[str]:
    """What the constructor says where the cache is empty and the hub is a port that nobody listens on."""
    hub = {"HF_HOME": str(folder), "HF_ENDPOINT": "http://127.0.0.1:9", "PYTHONPATH": ":".join(sys.path)}
    code = ASKED.replace("{keywords}", keywords)
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**hub, **environment},
        capture_output=True,
        text=True,
        timeout=500,
        check=True,
    )
    assert not ended.stderr  # one try, and no word of others
    return ended.stdout.splitlines()


@pytest.mark.parametrize("keywords", ["{}", "{'dispatch': True}"])
def test_a_hub_that_cannot_be_reached(tmp_path: Path, keywords: str) -> None:
    said, imported = refusal(tmp_path, keywords)

    assert said.startswith(f"'org/name' is neither a folder nor in the hub's cache ({tmp_path / 'hub'})")
    assert "http://127.0.0.1:9 cannot be reached (ConnectError: " in said
    assert "HF_HUB_OFFLINE" in said
    assert imported == "False"


def test_a_hub_that_must_not_be_asked(tmp_path: Path) -> None:
    said, imported = refusal(tmp_path, "{}", HF_HUB_OFFLINE="1")

    assert "HF_HUB_OFFLINE keeps the hub from being asked" in said
    assert imported == "False"


def test_what_the_cache_has_is_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--cached--name" / "snapshots" / "abc").mkdir(parents=True)

    check_repository("cached/name")
    with pytest.raises(FileNotFoundError, match="'absent/name' is neither"):
        check_repository("absent/name")


def test_other_names_are_left_to_vllm(tmp_path: Path) -> None:
    check_repository(str(tmp_path))
    check_repository("s3://bucket/model")
    check_repository("a/b/c")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        check_repository("./nowhere")
