"""A function and its operations as text and as HTML: the name of each operation beside the line of its call."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nnsight_async.tree.manifest import Manifest, SourceInfo

ARROW = " -> "


def as_text(where: str, source: SourceInfo) -> str:
    """The source with line numbers; several operations of one line stand under each other."""
    width = max((len(info.name) for info in source.operations), default=0)
    head = f"{where} ({source.name}, line {source.first_line})"
    return "\n".join([head, *_lines(source, width)])


def open_text(where: str) -> str:
    """What stands for a source that is not known before it runs."""
    return (
        f"{where} (which function is called here is decided while the forward runs; its operations can be asked for by "
        "the names of what it calls, as in attn_0)"
    )


def as_html(where: str, source: SourceInfo | None, manifest: Manifest) -> str:
    """The source, and below it those of the functions that it calls, folded; no scripts or styles of its own."""
    if source is None:
        return f"<pre>{escape(open_text(where))}</pre>"
    inside = [(info.name, manifest.sources[info.inside]) for info in source.operations if info.inside is not None]
    below = "".join(_folded(f"{where}.{name}.source", source) for name, source in inside)
    return f'<div class="nnsight-source"><pre>{escape(as_text(where, source))}</pre>{below}</div>'


def _folded(where: str, source: SourceInfo) -> str:
    return f"<details><summary>{escape(where)}</summary><pre>{escape(as_text(where, source))}</pre></details>"


def _lines(source: SourceInfo, width: int) -> Iterator[str]:
    names: dict[int, list[str]] = {}
    for info in source.operations:
        names.setdefault(info.line, []).append(info.name)
    lines = source.text.rstrip().splitlines()
    digits = len(str(source.first_line + len(lines)))
    for number, line in enumerate(lines, source.first_line):
        first, *more = names.get(number, [""])
        arrow = ARROW if first else " " * len(ARROW)
        yield f"{first:>{width}}{arrow}{number:>{digits}}  {line}".rstrip()
        for name in more:
            yield f"{name:>{width}}{ARROW}{'+':>{digits}}"
