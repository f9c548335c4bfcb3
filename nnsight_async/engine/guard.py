"""Whether a script may start processes where it is about to."""

from __future__ import annotations

import ast
from inspect import currentframe
from pathlib import Path
from types import FrameType

from nnsight_async.errors import MainGuardError
from nnsight_async.parse import parse


def check_main_guard() -> None:
    """Raise `MainGuardError` if the main script is building an engine outside `if __name__ == "__main__":`.

    vLLM starts its worker by spawning, which runs the main script again in the new process (vLLM 0.32, 0.33).
    """
    frame = _main_module_frame()
    if frame is None:
        return
    statement = _top_level_statement(frame)
    if statement is not None and not _is_guard(statement):
        raise MainGuardError(
            f"{frame.f_code.co_filename}, line {frame.f_lineno}: an engine is built outside "
            '`if __name__ == "__main__":`. vLLM spawns its worker process, which imports this script again and would '
            "build an engine again. Put the code of the script in a function and call it under the guard:\n\n"
            '    if __name__ == "__main__":\n        main()'
        )


def _main_module_frame() -> FrameType | None:
    frame: FrameType | None = currentframe()
    while frame is not None:
        name = frame.f_globals.get("__name__")
        if frame.f_code.co_name == "<module>" and name in ("__main__", "__mp_main__"):
            return frame
        frame = frame.f_back
    return None


def _top_level_statement(frame: FrameType) -> ast.stmt | None:
    """The statement of the script that is running; None where there is no script (a shell, a notebook, `-c`)."""
    file = frame.f_globals.get("__file__")
    if not file or file != frame.f_code.co_filename or not Path(file).is_file():
        return None
    try:
        tree = parse(Path(file).read_text())
    except (SyntaxError, OSError, ValueError):
        return None
    line = frame.f_lineno
    return next((node for node in tree.body if node.lineno <= line <= (node.end_lineno or line)), None)


def _is_guard(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.If):
        return False
    return any(isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(statement.test))
