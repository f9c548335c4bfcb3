"""A tree as text and as HTML."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from nnsight_async.interleave.locations import expression
from nnsight_async.tree.fold import fold

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nnsight_async.tree.fold import Node
    from nnsight_async.tree.manifest import Manifest, ModuleInfo, ParameterInfo

EXTRA_WIDTH = 60
OPEN_LEVELS = 2  # as far as the list of layers
SHORT = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "float64": "f64"}


def as_text(manifest: Manifest, path: str = "") -> str:
    """The tree below `path`, one module a line."""
    return "\n".join(_lines(fold(manifest, path), 0))


def as_html(manifest: Manifest, path: str = "") -> str:
    """The tree below `path` as nested `<details>`, without scripts or styles of its own."""
    return f'<div class="nnsight-tree" style="font-family: monospace">{_html(fold(manifest, path), 0)}</div>'


def _lines(node: Node, depth: int) -> Iterator[str]:
    yield "  " * depth + "  ".join([_title(node, EXTRA_WIDTH), *_details(node.info)])
    for child in node.children:
        yield from _lines(child, depth + 1)


def _html(node: Node, depth: int) -> str:
    line = escape("  ".join([_title(node, None), *_details(node.info)]))
    if not node.children:
        return f'<div style="margin-left: 1.5em">{line}</div>'
    children = "".join(_html(child, depth + 1) for child in node.children)
    state = " open" if depth < OPEN_LEVELS else ""
    return f'<details{state} style="margin-left: 1.5em"><summary>{line}</summary>{children}</details>'


def _title(node: Node, extra_width: int | None) -> str:
    label = f"({node.label}): " if node.label else ""
    times = f"{node.count} x " if node.count > 1 else ""
    extra = node.info.extra
    if extra_width is not None and len(extra) > extra_width:
        extra = extra[: extra_width - 3].rstrip(" ,") + "..."
    return f"{label}{times}{node.info.cls}" + (f"({extra})" if extra else "")


def _details(info: ModuleInfo) -> Iterator[str]:
    yield from map(_size, info.parameters)
    if mark := _mark(info):
        yield f"[{mark}]"


def _size(parameter: ParameterInfo) -> str:
    shape, dtype = list(parameter.shape), SHORT.get(parameter.dtype, parameter.dtype)
    if not parameter.sharded:
        return f"{parameter.name} {shape} {dtype}"
    return f"{parameter.name} {shape} of {list(parameter.full_shape)} {dtype}, split along {parameter.shard_dim}"


def _mark(info: ModuleInfo) -> str:
    if info.reason is not None:
        return f"not readable: {info.reason}"
    if info.aliases:
        return f"shared by {len(info.aliases) + 1} paths; read it at {expression(info.path)}"
    return ""
