from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nnsight_async.folders import cache_folder, publish


def test_the_cache_folder_follows_our_variable_then_xdg_then_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("NNSIGHT_ASYNC_CACHE", raising=False)
    assert cache_folder("a", "b") == Path("/home/somebody/.cache/nnsight_async/a/b")

    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/nnsight_async")

    monkeypatch.setenv("NNSIGHT_ASYNC_CACHE", "/ours")
    assert cache_folder("a") == Path("/ours/a")


def test_of_many_that_publish_at_once_one_wins_and_all_use_it(tmp_path: Path) -> None:
    together = threading.Barrier(4)

    def fill(draft: Path) -> None:
        together.wait(timeout=60)
        (draft / "author").write_text(str(threading.get_ident()))

    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(lambda _: publish(tmp_path / "made", fill), range(4)))

    assert folders == [tmp_path / "made"] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    assert [path.name for path in folders[0].iterdir()] == ["author"]


def test_a_folder_that_could_not_be_filled_does_not_appear(tmp_path: Path) -> None:
    def fill(draft: Path) -> None:
        (draft / "half").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        publish(tmp_path / "made", fill)

    assert list(tmp_path.iterdir()) == []


def test_what_exists_is_kept(tmp_path: Path) -> None:
    publish(tmp_path / "made", lambda draft: (draft / "first").touch())

    publish(tmp_path / "made", lambda draft: pytest.fail("filled again"))

    assert [path.name for path in (tmp_path / "made").iterdir()] == ["first"]
