from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nnsight_async.tree import cache
from nnsight_async.tree.manifest import Manifest, ModuleInfo

if TYPE_CHECKING:
    from pathlib import Path

KEY = "0" * 64


def manifest_named(repo: str) -> Manifest:
    modules = {"": ModuleInfo(path="", cls="Toy", qualified="toy.Toy", extra="x" * 50_000)}
    return Manifest(repo=repo, vllm_version="0", modules=modules)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NNSIGHT_ASYNC_CACHE", str(tmp_path))
    return tmp_path


def stored_file(folder: Path) -> Path:
    (file,) = (folder / "manifests").iterdir()
    return file


def test_what_is_stored_is_loaded() -> None:
    assert cache.load(KEY) is None

    cache.store(KEY, manifest_named("a"))

    assert cache.load(KEY) == manifest_named("a")


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
def test_any_damage_is_a_miss_and_heals(folder: Path, data: st.DataObject) -> None:
    cache.store(KEY, manifest_named("a"))
    file = stored_file(folder)
    content = bytearray(file.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content = content[:place]
    else:
        content[place] ^= data.draw(st.integers(1, 255))
    file.write_bytes(content)

    assert cache.load(KEY) is None
    cache.store(KEY, manifest_named("a"))
    assert cache.load(KEY) == manifest_named("a")


def test_readers_among_many_writers_see_whole_files(folder: Path) -> None:
    repos = [f"repo-{number}" for number in range(8)]
    cache.store(KEY, manifest_named(repos[0]))

    def write(repo: str) -> None:
        for _ in range(20):
            cache.store(KEY, manifest_named(repo))

    with ThreadPoolExecutor(len(repos)) as pool:
        writers = [pool.submit(write, repo) for repo in repos]
        while not all(writer.done() for writer in writers):
            seen = cache.load(KEY)
            assert seen is not None
            assert seen.repo in repos
        for writer in writers:
            writer.result()
    assert stored_file(folder).suffix == ".manifest"


WRITER = """
import sys
from nnsight_async.tree import cache
from nnsight_async.tree.manifest import Manifest, ModuleInfo
modules = {"": ModuleInfo(path="", cls="Toy", qualified="toy.Toy", extra="x" * 50_000)}
for _ in range(50):
    cache.store("0" * 64, Manifest(repo=sys.argv[1], vllm_version="0", modules=modules))
"""


def test_processes_do_not_mix_their_files(folder: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, name], env=os.environ) for name in "ab"]

    assert [writer.wait(60) for writer in writers] == [0, 0]
    assert cache.load(KEY) in (manifest_named("a"), manifest_named("b"))
    assert stored_file(folder).suffix == ".manifest"


def test_a_folder_that_cannot_be_written_is_no_error(folder: Path) -> None:
    (folder / "manifests").write_text("a file where the folder should be")

    cache.store(KEY, manifest_named("a"))

    assert cache.load(KEY) is None


def key_of(repo: object, **changes: object) -> str | None:
    return cache.manifest_key(str(repo), **{"vllm_version": "1", "layout": {"tp": 1}, **changes})  # type: ignore[arg-type]


def test_the_key_of_a_folder_is_its_configuration_and_the_layout(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    first = key_of(model)
    (model / "model.safetensors").write_text("weights")

    assert key_of(model) == first
    assert len({first, key_of(model, vllm_version="2"), key_of(model, layout={"tp": 2})}) == 3
    (model / "config.json").write_text('{"layers": 3}')
    assert key_of(model) != first


def test_the_key_of_a_hub_repository_is_the_commit_in_the_local_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    reference = tmp_path / "models--org--name" / "refs" / "main"

    assert key_of("org/name") is None
    reference.parent.mkdir(parents=True)
    reference.write_text("a" * 40)
    first = key_of("org/name")
    assert first is not None
    assert key_of("org/name", revision="a" * 40) == first
    reference.write_text("b" * 40)
    assert key_of("org/name") not in (first, None)


def test_hub_repositories_are_looked_for_where_the_hub_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME"):
        if variable in os.environ:
            pytest.skip(f"{variable} is set")

    assert str(cache._hub_cache()) == huggingface_hub.constants.HF_HUB_CACHE
