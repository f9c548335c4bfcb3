"""Paths that the code of a block is written against, in the client and in the worker alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Self, overload

from nnsight_async.errors import ItemError, LocationError, NotAListError, UnreadableError
from nnsight_async.interleave.context import current, running
from nnsight_async.interleave.locations import Location, expression
from nnsight_async.interleave.refusals import unreadable
from nnsight_async.tree import residual
from nnsight_async.tree.heads import Heads, heads_below
from nnsight_async.tree.manifest import join
from nnsight_async.tree.names import missing, unsettable
from nnsight_async.tree.render import as_html, as_text
from nnsight_async.tree.source import Source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nnsight_async.tree.manifest import Manifest

ABSENT = object()
SETTABLE = ("output", "input", "inputs", "resid_pre", "resid_mid", "resid_post")
ANOTHER_MODEL = "use the modules of the model that is traced; trace the other one by itself, and use its values here"


class Envoy:
    """The module at one path of a model.

    Children are attributes; items of a list are had by index, slice or iteration. A child whose name is one of the
    Envoy's own attributes (BERT has one called `output`) is had by its name as an item: `envoy["output"]`. That works
    for every child. Inside a block any other attribute is the one of the real module.
    """

    __block_advice__ = ANOTHER_MODEL
    _items: tuple[Self, ...] | None

    def __init__(self, manifest: Manifest, path: str = "") -> None:
        info = manifest.modules[path]
        own = self.__dict__
        own["_manifest"] = manifest
        own["_path"] = path
        own["_info"] = info
        own["_unreadable"] = info.reason
        own["_named"] = {}
        own["_items"] = None
        own["_places"] = {}
        own["_output"] = Location(path, "output")
        own["_input"] = Location(path, "input")
        own["_inputs"] = Location(path, "inputs")

    # What a module passes on

    @property
    def output(self) -> Any:
        """What the module returned for this run, a private copy; assign to replace it, or change it in place."""
        return self._read(self._output)

    @output.setter
    def output(self, value: Any) -> None:
        self._write(self._output, value)

    @property
    def input(self) -> Any:
        """The first positional argument of the module; assign to replace it, or change it in place."""
        return self._read(self._input)

    @input.setter  # noqa: A003  what every module calls it
    def input(self, value: Any) -> None:
        self._write(self._input, value)

    @property
    def inputs(self) -> Any:
        """All arguments of the module: `(args, kwargs)`; assign to replace them, or change tensors in place."""
        return self._read(self._inputs)

    @inputs.setter
    def inputs(self, value: Any) -> None:
        self._write(self._inputs, value)

    @property
    def resid_pre(self) -> Any:
        """The residual stream before this layer, `[rows, hidden]`; assign to replace it, or change it in place."""
        return self._read_stream(residual.before)

    @resid_pre.setter
    def resid_pre(self, value: Any) -> None:
        self._write_stream(residual.before, value)

    @property
    def resid_mid(self) -> Any:
        """The residual stream between this layer's attention and MLP, `[rows, hidden]`."""
        return self._read_stream(residual.middle)

    @resid_mid.setter
    def resid_mid(self, value: Any) -> None:
        self._write_stream(residual.middle, value)

    @property
    def resid_post(self) -> Any:
        """The residual stream after this layer, `[rows, hidden]`."""
        return self._read_stream(residual.after)

    @resid_post.setter
    def resid_post(self, value: Any) -> None:
        self._write_stream(residual.after, value)

    @property
    def heads(self) -> Heads:
        """The heads of the attention layer in this module: `heads[i].output`, `.q`, `.k`, `.v`."""
        return self._seen(lambda: heads_below(self._manifest, self._path))

    @property
    def source(self) -> Source:
        """The operations inside the module's forward; `UnreadableError` where that is not Python."""
        return self._seen(self._sourced)

    def skip(self, value: Any) -> None:
        """Have `value` be what the module returns for this run's rows, whatever it would compute.

        `value` has the structure and the rows of the module's output; `ShapeError` otherwise. Other requests in the
        step get what the module computes for them.
        """
        self._write(self._output, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the module to values of the block, outside the forward pass; `OutsideBlockError` elsewhere."""
        return current().call(self._path, args, kwargs)

    def _read(self, location: Location) -> Any:
        if self._unreadable is not None:
            return self._seen(self._refuse)
        try:
            return current().read(location)
        except AttributeError as error:
            self.__dict__["_failed"] = error
            raise

    def _read_stream(self, place: Callable[[Manifest, str], residual.Place]) -> Any:
        return self._seen(lambda: current().read_view(*self._place(place)))

    def _write_stream(self, place: Callable[[Manifest, str], residual.Place], value: Any) -> None:
        location, view, written = self._place(place)
        current().write_view(location, view, value, written)

    def _place(self, place: Callable[[Manifest, str], residual.Place]) -> residual.Place:
        found = self._places.get(place)
        if found is None:
            found = self._places[place] = place(self._manifest, self._path)
        return found

    def _seen(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except AttributeError as error:
            # Python answers an AttributeError of a property by calling __getattr__, which raises it once more.
            self.__dict__["_failed"] = error
            raise

    def _write(self, location: Location, value: Any) -> None:
        if self._unreadable is not None:
            raise self._refusal()
        current().write(location, value)

    def _sourced(self) -> Source:
        info = self._info
        if info.source is None:
            raise UnreadableError(unreadable(f"{expression(self._path)}.source", info.sourceless))
        refusal = None if self._unreadable is None else str(self._refusal())
        return Source(self._manifest, self._path, "", info.source, refusal)

    def _refuse(self) -> NoReturn:
        raise self._refusal()

    def _refusal(self) -> UnreadableError:
        return UnreadableError(f"{expression(self._path)} ({self._info.cls}) cannot be read: {self._unreadable}")

    # Children

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_info" not in self.__dict__:  # probes of copy, pickle and IPython
            raise AttributeError(name)
        if isinstance(getattr(type(self), name, None), property):
            raise self.__dict__.pop("_failed", None) or AttributeError(name)
        alias = self._manifest.renames.get(name)
        if alias is not None and name not in self._info.children and self._has(alias):
            child = self.__dict__[name] = self._descend(alias)
            return child
        if name in self._info.children:
            child = self.__dict__[name] = self._child(name)
            return child
        context = running()
        value = ABSENT if context is None else context.attribute(self._path, name, ABSENT)
        if value is ABSENT:
            raise LocationError(missing(self._manifest, self._path, name))
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        declared = getattr(type(self), name, None)
        if not isinstance(declared, property) or declared.fset is None:
            raise LocationError(unsettable(expression(self._path), name, SETTABLE))
        object.__setattr__(self, name, value)

    @overload
    def __getitem__(self, key: int | str) -> Self: ...
    @overload
    def __getitem__(self, key: slice) -> list[Self]: ...
    def __getitem__(self, key: int | str | slice) -> Self | list[Self]:
        if isinstance(key, str):
            return self._child(key)
        items = self._items or self._all_items()
        if isinstance(key, slice):
            return list(items[key])
        try:
            return items[key]
        except IndexError:
            where = expression(self._path)
            raise ItemError(f"{where}[{key}] does not exist: {where} has {len(items)} items") from None

    def __len__(self) -> int:
        return len(self._items or self._all_items())

    def __iter__(self) -> Iterator[Self]:
        return iter(self._items or self._all_items())

    def __bool__(self) -> bool:
        return True

    def _child(self, name: str) -> Self:
        child = self._named.get(name)
        if child is None:
            if name not in self._info.children:
                raise LocationError(missing(self._manifest, self._path, name))
            child = self._named[name] = type(self)(self._manifest, join(self._path, name))
        return child

    def _has(self, alias: str) -> bool:
        """Whether a renamed path or module name is meant here: a path at the root, a name wherever it is a child."""
        return not self._path if "." in alias else alias in self._info.children

    def _descend(self, path: str) -> Self:
        found = self
        for name in path.split("."):
            found = found._child(name)
        return found

    def _all_items(self) -> tuple[Self, ...]:
        if not self._info.is_list:
            children = ", ".join(self._info.children) or "none"
            what = f"{expression(self._path)} is a {self._info.cls}, not a list"
            raise NotAListError(f"{what}; its children: {children}")
        items = self.__dict__["_items"] = tuple(self._child(name) for name in self._info.children)
        return items

    # How it shows

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *(name for name in self._info.children if name.isidentifier())})

    def __repr__(self) -> str:
        return as_text(self._manifest, self._path)

    def _repr_html_(self) -> str:
        return as_html(self._manifest, self._path)

    def __block_check__(self) -> None:
        """Raise what reading the module would, where that is known."""
        if self._unreadable is not None:
            raise self._refusal()

    def __block_reference__(self) -> tuple[str, ...]:
        return ("module", self._path)

    @property
    def __block_owner__(self) -> Manifest:
        return self._manifest
