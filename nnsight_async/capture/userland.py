"""Which modules are the user's own: the worker may not have them, or may have an older text of them."""

from __future__ import annotations

import functools
import os
import site
import sys
import sysconfig
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

_SHARED = frozenset({"nnsight_async", "torch", "transformers", "vllm"})  # also where they are installed for editing
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def is_user_module(name: str) -> bool:
    """Whether the loaded module `name` is neither part of Python nor installed in this environment."""
    module = sys.modules.get(name)
    if module is None or name.partition(".")[0] in _SHARED:
        return False
    return name == "__main__" or _is_user_file(_file_of(module))


def _file_of(module: ModuleType) -> str | None:
    file = getattr(module, "__file__", None)
    if file is None:  # a namespace package
        file = next(iter(getattr(module, "__path__", ())), None)
    return file if isinstance(file, str) else None


@functools.lru_cache(maxsize=4096)
def _is_user_file(file: str | None) -> bool:
    if file is None or file.endswith((".so", ".pyd")) or any(part in file for part in _INSTALLED):
        return False
    path = os.path.realpath(file)
    return not any(path.startswith(root) for root in _library_roots())


@functools.cache
def _library_roots() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    roots = {paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    roots.update((*site.getsitepackages(), site.getusersitepackages()))
    return tuple(f"{os.path.realpath(root)}{os.sep}" for root in roots)
