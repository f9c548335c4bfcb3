"""The operations inside a module's forward, as paths that the code of a block is written against."""

# The two classes know each other's slots; names without an underscore are those of operations.
# pyright: reportPrivateUsage=false
from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from nnsight_async.errors import LocationError, UnreadableError
from nnsight_async.interleave.context import current
from nnsight_async.interleave.locations import Location
from nnsight_async.interleave.refusals import missing, unreadable
from nnsight_async.tree.listed import as_html, as_text, open_text
from nnsight_async.tree.names import similar, unsettable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nnsight_async.tree.manifest import Manifest, OperationInfo, SourceInfo


SETTABLE = ("output", "input", "inputs")


class Source:
    """The source of a function that the forward pass runs: printed, it shows each operation beside its line.

    Operations are attributes, named after what they call with a counter: `source.attn_0`. Iterating gives the names.
    Inside a function whose callee is decided while it runs, any name can be asked for; whether it is there shows then.
    """

    __slots__ = ("_info", "_manifest", "_operation", "_path", "_refusal")

    def __init__(self, manifest: Manifest, path: str, operation: str, key: str | None, refusal: str | None) -> None:
        put = object.__setattr__
        put(self, "_manifest", manifest)
        put(self, "_path", path)
        put(self, "_operation", operation)
        put(self, "_info", None if key is None else manifest.sources[key])
        put(self, "_refusal", refusal)

    _manifest: Manifest
    _path: str
    _operation: str
    _info: SourceInfo | None
    _refusal: str | None

    def __getattr__(self, name: str) -> Operation:
        if name.startswith("__") and name.endswith("__"):  # probes of copy, pickle and IPython
            raise AttributeError(name)
        if self._info is None:
            return Operation(self, name, None)
        info = next((info for info in self._info.operations if info.name == name), None)
        if info is None:
            raise LocationError(missing(self._written(), name, list(self)))
        return Operation(self, name, info)

    def __getitem__(self, name: str) -> Operation:
        return self.__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise LocationError(f"{self._written()}.{name} cannot be set; its .output, .input and .inputs can")

    def __iter__(self) -> Iterator[str]:
        return iter([info.name for info in self._info.operations] if self._info is not None else ())

    def __len__(self) -> int:
        return len(self._info.operations) if self._info is not None else 0

    def __bool__(self) -> bool:
        return True

    def __contains__(self, name: object) -> bool:
        return name in list(self)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *self})

    def __repr__(self) -> str:
        return open_text(self._written()) if self._info is None else as_text(self._written(), self._info)

    def _repr_html_(self) -> str:
        return as_html(self._written(), self._info, self._manifest)

    def __block_reference__(self) -> tuple[str, ...]:
        return ("source", self._path, self._operation)

    @property
    def __block_owner__(self) -> object:
        return self._manifest

    def _written(self) -> str:
        return str(Location(self._path, "output", self._operation)).removesuffix(".output") + ".source"


class Operation:
    """One call inside a forward: what goes into it and what comes out, and the operations of the function it calls."""

    __slots__ = ("_failed", "_info", "_name", "_operation", "_owner")

    def __init__(self, owner: Source, name: str, info: OperationInfo | None) -> None:
        within = owner._operation
        self._owner = owner
        self._name = name
        self._info = info
        self._operation = f"{within}/{name}" if within else name
        self._failed: AttributeError | None = None

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") or hasattr(type(self), name):
            # Python answers an AttributeError of a property by coming here
            failed, self._failed = self._failed, None
            raise failed or AttributeError(name)
        near = similar(name, ("output", "input", "inputs", "source"))
        here = f"{self._owner._written()}.{self._name}"
        instead = f"did you mean {here}.{near[0]}?" if near else "it has output, input, inputs and source"
        raise LocationError(f"{here} has no {name!r}; {instead}")

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name not in SETTABLE:
            raise LocationError(unsettable(f"{self._owner._written()}.{self._name}", name, SETTABLE))
        object.__setattr__(self, name, value)

    @property
    def output(self) -> Any:
        """What the call returned for this run, a private copy; assign to replace it, or change it in place."""
        return self._read("output")

    @output.setter
    def output(self, value: Any) -> None:
        current().write(self._at("output"), value)

    @property
    def input(self) -> Any:
        """The first argument of the call; assign to replace it, or change it in place."""
        return self._read("input")

    @input.setter  # noqa: A003  what every module calls it
    def input(self, value: Any) -> None:
        current().write(self._at("input"), value)

    @property
    def inputs(self) -> Any:
        """All arguments of the call: `(args, kwargs)`; assign to replace them, or change tensors in place."""
        return self._read("inputs")

    @inputs.setter
    def inputs(self, value: Any) -> None:
        current().write(self._at("inputs"), value)

    @property
    def source(self) -> Source:
        """The operations inside the Python function that is called here; `UnreadableError` if it is none."""
        owner, info = self._owner, self._info
        if info is not None and info.reason is not None:
            self._failed = UnreadableError(unreadable(f"{owner._written()}.{self._name}.source", info.reason))
            raise self._failed
        key = None if info is None else info.inside
        return Source(owner._manifest, owner._path, self._operation, key, owner._refusal)

    def _read(self, kind: Any) -> Any:
        try:
            return current().read(self._at(kind))
        except AttributeError as error:
            self._failed = error
            raise

    def _at(self, kind: Any) -> Location:
        owner = self._owner
        if owner._refusal is not None:
            raise UnreadableError(owner._refusal)
        return Location(owner._path, kind, self._operation)

    def __repr__(self) -> str:
        where = f"{self._owner._written()}.{self._name}"
        return where if self._info is None else f"{where}: {self._info.callee}(...) in line {self._info.line}"

    def __block_reference__(self) -> tuple[str, ...]:
        return ("operation", self._owner._path, self._operation)

    @property
    def __block_owner__(self) -> object:
        return self._owner._manifest
