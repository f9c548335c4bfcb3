"""The heads of an attention layer, as views of what passes through it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Never

from nnsight_async.errors import LocationError, NotAListError, ShapeError
from nnsight_async.interleave.context import current
from nnsight_async.interleave.locations import Location, expression
from nnsight_async.tree.names import unsettable

if TYPE_CHECKING:
    from nnsight_async.tree.manifest import Manifest

QUERY, KEY, VALUE = 0, 1, 2
SETTABLE = ("output", "q", "k", "v")


class Heads:
    """All heads of one attention layer; `heads[i]` is one of them.

    `output`, `q`, `k` and `v` are `[rows, heads, head_size]`, with as many heads as each has (k and v have fewer under
    grouped-query attention). Changes in place land, and so do assignments.
    """

    __slots__ = ("_manifest", "_path")

    def __init__(self, manifest: Manifest, path: str) -> None:
        self._manifest = manifest
        self._path = path

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name not in SETTABLE:
            raise LocationError(unsettable(f"{expression(self._path)}.heads", name, SETTABLE))
        object.__setattr__(self, name, value)

    @property
    def path(self) -> str:
        """The path of the attention layer."""
        return self._path

    def __block_reference__(self) -> tuple[str, ...]:
        return ("heads", self._path)

    @property
    def __block_owner__(self) -> object:
        return self._manifest

    @property
    def output(self) -> Any:
        """What each head adds up from the values, before the output projection."""
        return self._split(current().read(Location(self._path, "output")))

    @output.setter
    def output(self, value: Any) -> None:
        _put(self.output, value)

    @property
    def q(self) -> Any:
        """Queries, as the attention gets them (after rotary embedding)."""
        return self._argument(QUERY)

    @q.setter
    def q(self, value: Any) -> None:
        _put(self.q, value)

    @property
    def k(self) -> Any:
        """Keys of this step's rows, as the attention gets them (after rotary embedding)."""
        return self._argument(KEY)

    @k.setter
    def k(self, value: Any) -> None:
        _put(self.k, value)

    @property
    def v(self) -> Any:
        """Values of this step's rows."""
        return self._argument(VALUE)

    @v.setter
    def v(self, value: Any) -> None:
        _put(self.v, value)

    def __getitem__(self, head: int) -> Head:
        return Head(self, head)

    def __iter__(self) -> Never:
        raise NotAListError(
            "heads are not iterated over, as how many there are is known where they pass: `heads.output` is "
            "[rows, heads, head_size], and `heads[i]` one of them"
        )

    def grouped(self, number: int, head: int) -> Any:
        """The head of keys or values that the query head `head` looks at."""
        arguments = current().read(Location(self._path, "inputs"))
        queries, rows = (self._split(_argument(arguments, which)) for which in (QUERY, number))
        return rows[:, head * rows.shape[1] // queries.shape[1]]

    def _argument(self, number: int) -> Any:
        return self._split(_argument(current().read(Location(self._path, "inputs")), number))

    def _split(self, rows: Any) -> Any:
        module: Any = current().module(self._path)
        return rows.view(rows.shape[0], -1, module.head_size)


def _put(there: Any, value: Any) -> None:
    """Write `value` over a view of what passes; `ShapeError` if it does not fit."""
    import torch

    wanted = tuple(there.shape)
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != wanted:
        given = f"one of {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise ShapeError(f"these heads take a tensor of shape {wanted}, not {given}")
    if not torch.can_cast(value.dtype, there.dtype):
        raise ShapeError(f"these heads hold {there.dtype}; {value.dtype} does not convert to it safely")
    there[:] = value


def _argument(arguments: Any, number: int) -> Any:
    args, kwargs = arguments
    return args[number] if number < len(args) else kwargs[("query", "key", "value")[number]]


class Head:
    """One head: `output`, `q`, `k` and `v` are `[rows, head_size]`; k and v are those of its group."""

    __slots__ = ("_heads", "_number")

    def __init__(self, heads: Heads, number: int) -> None:
        self._heads = heads
        self._number = number

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name not in SETTABLE:
            raise LocationError(unsettable(f"{expression(self._heads.path)}.heads[{self._number}]", name, SETTABLE))
        object.__setattr__(self, name, value)

    @property
    def output(self) -> Any:
        return self._heads.output[:, self._number]

    @output.setter
    def output(self, value: Any) -> None:
        _put(self.output, value)

    @property
    def q(self) -> Any:
        return self._heads.q[:, self._number]

    @q.setter
    def q(self, value: Any) -> None:
        _put(self.q, value)

    @property
    def k(self) -> Any:
        return self._heads.grouped(KEY, self._number)

    @k.setter
    def k(self, value: Any) -> None:
        _put(self.k, value)

    @property
    def v(self) -> Any:
        return self._heads.grouped(VALUE, self._number)

    @v.setter
    def v(self, value: Any) -> None:
        _put(self.v, value)


def heads_below(manifest: Manifest, path: str) -> Heads:
    """The heads of the one attention layer at or below `path`; `LocationError` if there is none, or more than one."""
    inside = [other for other in manifest.modules if other == path or other.startswith(f"{path}.")]
    found = [other for other in inside if manifest.modules[other].cls == "Attention"]
    if not found:
        raise LocationError(
            f"{expression(path)} holds no attention layer of vLLM, and so has no heads; in a model of transformers "
            "they are in its projections, such as the input of `o_proj`"
        )
    if len(found) > 1:
        raise LocationError(f"{expression(path)} holds {len(found)} attention layers, and so has no heads of its own")
    return Heads(manifest, found[0])
