from __future__ import annotations

from functools import partial
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from nnsight_async.capture import filled, forgotten
from nnsight_async.capture.bind import bind
from nnsight_async.capture.block import Block
from nnsight_async.capture.compile import PARAMETERS, template
from nnsight_async.capture.diagnose import shipping_error
from nnsight_async.capture.kept import refuse
from nnsight_async.capture.load import VERSION, Body
from nnsight_async.capture.scope import Scope, mangle
from nnsight_async.capture.ship import Pickled, Unshippable, dumps
from nnsight_async.capture.skip import BodySkip, SkipSignal
from nnsight_async.capture.text import Text, Written
from nnsight_async.capture.written import ANNOTATIONS, cut
from nnsight_async.errors import CaptureError, ShippingError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_MODULE_NAMES = ("__name__", "__package__")  # for imports, warnings and loggers in the body


class BodyCapture:
    """The body of the `with` that `frame` is entering: not run here, but made into a block.

    Raises `CaptureError` if its source cannot be had, or if it holds a statement that no block can.
    """

    def __init__(self, frame: FrameType, *, carries: bool = False) -> None:
        """`carries`: what the code around reads of the names that the body assigns comes home without a save."""
        self._frame = frame
        self._carries = carries
        try:
            self._template = template(frame)
            self._statement = self._template.statement
            self._check()
        except CaptureError as error:
            raise error.with_traceback(_at(frame)) from error.__cause__
        self._skip = BodySkip(frame, self._statement.stop)

    def _check(self) -> None:
        """What can be told of the body before it runs, and of the variables around it."""
        found, statement = self._template, self._statement
        if found.kept or found.forgotten or found.filled:
            scope, line = Scope(self._frame, statement), statement.node.lineno
            refuse(found.kept, scope.written, statement.source)
            if not self._carries:
                forgotten.warn(found.forgotten, scope.written, self._frame, line)
            lost = filled.lost(found.filled, scope.written, self._carried)
            filled.warn(lost, statement.source.filename, self._frame.f_globals, line)

    def skip(self, entered: object = None) -> None:
        """Arrange that the body does not run; the last thing that `__enter__` does, before it returns `entered`."""
        self._entered = entered
        self._skip.arm()

    def leave(self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> bool:
        """Give tracing back; True if the `with` ended because its body was skipped."""
        self._skip.disarm()
        self._skip.forget()
        if self._skip.fired and (target := self._statement.stop.target) is not None:
            self.bind({target: self._entered})
        if self._skip.caused(exc):
            return True
        if exc is not None and isinstance(exc.__context__, SkipSignal):  # raised by a later context manager's exit
            exc.__context__ = None
        if exc is None and not self._skip.fired and self._statement.stop.offsets:
            raise CaptureError(
                f"{self._frame.f_code.co_filename}, line {self._statement.node.lineno}: the body of this `with` ran "
                "here instead of becoming a block, because something else took the trace function of this thread away. "
                "Put the trace last in the `with`, or use the function form: model.run(prompt, probe)"
            )
        return False

    def block(self, owners: Collection[object] | None = None) -> Block:
        """The block, with the values that outer names have now; ShippingError names one that cannot travel.

        `owners` are the model that it will run on and the tracers that its code may use.
        """
        self._dump = partial(dumps, attributes=self._template.attributes, owners=owners)
        code = self._frame.f_code
        try:
            pickled = self._pickled(*self._values())
        except (CaptureError, ShippingError) as error:
            raise error.with_traceback(_at(self._frame)) from error.__cause__
        return Block(
            payload=VERSION + pickled.payload,
            names=(*self._template.names, *self._carried),
            filename=code.co_filename,
            first_line=self._statement.node.lineno,
            function=code.co_name,
            constants=pickled.constants,
        )

    def text(self) -> Text:
        """The body as it stands, and what names have for values now."""
        scope, code = Scope(self._frame, self._statement), self._frame.f_code
        return Text(
            body=self._statement.node.body,
            seen=scope.seen,
            names=self._template.names,
            filename=code.co_filename,
            first_line=self._statement.node.lineno,
            function=code.co_name,
            written=self._written,
            attributes=self._template.attributes,
            optional=self._template.possible,
            traceback=_at(self._frame),
        )

    def _written(self) -> Written | None:
        statement, body = self._statement, self._template
        found = cut(statement.source.lines, statement.node.body)
        if found is None:
            return None
        return Written(
            text=found[0],
            first_line=found[1],
            lines=(statement.node.lineno, statement.node.end_lineno or statement.node.lineno),
            parameters=PARAMETERS,
            free=body.free,
            entries=(*body.certain, *body.possible),
            qualname=statement.qualname,
            class_name=statement.class_name,
            annotations=bool(statement.flags & ANNOTATIONS),
            module=self._frame.f_globals.get("__name__", ""),
        )

    def bind(self, values: Mapping[str, object]) -> None:
        """Assign `values` to the variables of the caller."""
        names = {name: mangle(name, self._statement.class_name) for name in values}
        bind(self._frame, {names[name]: value for name, value in values.items()}, self._statement.declared_global)

    @property
    def _carried(self) -> tuple[str, ...]:
        return self._template.carried if self._carries else ()

    def _values(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the body's globals and its parameters are, as far as they are bound."""
        scope = Scope(self._frame, self._statement)
        free = _present(self._template.free, scope.seen)
        return free, _present((*self._template.certain, *self._template.possible), scope.own)

    def _pickled(self, free: dict[str, Any], entries: dict[str, Any]) -> Pickled:
        try:
            return self._dumps(free, entries)
        except Unshippable as failure:
            return self._without_stale(free, entries, failure)

    def _without_stale(self, free: dict[str, Any], entries: dict[str, Any], failure: Unshippable) -> Pickled:
        """Names that the body may well assign first can hold what an earlier trace left there: they may stay behind."""
        certain = {name: value for name, value in entries.items() if name in self._template.certain}
        kept = dict(entries)
        for name in entries.keys() - certain.keys():
            try:
                self._dump(entries[name])
            except Unshippable:
                del kept[name]
        if len(kept) < len(entries):
            try:
                return self._dumps(free, kept)
            except Unshippable as other:
                failure = other
        raise shipping_error(
            {**free, **certain},
            self._dump,
            self._frame.f_code.co_filename,
            self._template.lines,
            failure,
        ) from failure.__cause__

    def _dumps(self, free: dict[str, Any], entries: dict[str, Any]) -> Pickled:
        namespace = self._frame.f_globals
        names = {name: namespace[name] for name in _MODULE_NAMES if name in namespace}
        code = self._template.code(tuple(entries), self._carried)
        plain = None if self._carried else self._template.plain
        body = Body(code, {**names, **free}, tuple(entries.values()), plain)
        return self._dump(tuple(body))


def _at(frame: FrameType) -> TracebackType:
    """For what is said of the body: its traceback ends at the statement, and not in the depths of this package."""
    return TracebackType(None, frame, frame.f_lasti, frame.f_lineno)


def _present(names: tuple[str, ...], value_of: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in names:
        try:
            values[name] = value_of(name)
        except KeyError:
            continue
    return values
