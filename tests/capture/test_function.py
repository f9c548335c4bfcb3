# ruff: noqa: RET504 -- a block is what is assigned in it, and may well be several statements
"""The function form: probe(model, tracer), in every shape a callable can have."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest

from nnsight_async.capture.function import from_function
from nnsight_async.capture.load import load
from nnsight_async.errors import CaptureError, ShippingError

OFFSET = 5


def resolve(reference: tuple[str, ...]) -> object:
    return {"model": "the model"}[reference[0]]


def run(probe: Any, model: object = 2, tracer: object = 3) -> object:
    return load(from_function(probe).payload, resolve)(model, tracer)


def plain(model: Any, tracer: Any) -> int:
    return model * 10 + tracer + OFFSET


def collect(value: Any) -> Any:
    kept = value.save()
    return kept + 1


def saving(model: Any, tracer: Any, scale: int = 2, *, shift: int = 1) -> Any:
    hidden = (model * scale + shift).save()
    logits: int = (hidden + tracer).save()
    return logits


def test_a_function_of_a_module() -> None:
    assert run(plain) == plain(2, 3)


def test_a_lambda() -> None:
    assert run(lambda model, tracer: (model, tracer)) == (2, 3)


def test_a_closure() -> None:
    a, b = 1, [2]

    def probe(model: Any, tracer: Any) -> object:
        return a, b, model

    assert run(probe) == (1, [2], 2)


def test_saves_know_their_names(saves: Any) -> None:
    assert run(saving) == 8
    assert saves == {"hidden": 5, "logits": 8}
    assert from_function(saving).names == ("hidden", "logits")


def test_defaults_are_kept(saves: Any) -> None:
    assert run(functools.partial(saving, scale=10, shift=0)) == 23


def test_a_lambda_that_saves(saves: Any) -> None:
    first, second = lambda model, tracer: (model + 1).save(), lambda model, tracer: (tracer * 2).save()

    assert (run(first), run(second)) == (3, 6)
    assert saves == {"model + 1": 3, "tracer * 2": 6}


def test_a_helper_that_saves(saves: Any) -> None:
    def probe(model: Any, tracer: Any) -> Any:
        return collect(model) + collect(tracer)

    assert run(probe) == 7
    assert saves == {"value": 3}


def test_a_nested_function_that_saves(saves: Any) -> None:
    def probe(model: Any, tracer: Any) -> Any:
        def inner(x: Any) -> Any:
            y = x.save()
            return y

        return [inner(v) for v in (model, tracer)]

    assert run(probe) == [2, 3]
    assert from_function(probe).names == ()


def test_a_decorated_function(saves: Any) -> None:
    def twice(function: Any) -> Any:
        @functools.wraps(function)
        def around(*args: Any) -> Any:
            return function(*args), function(*args)

        return around

    @twice
    def probe(model: Any, tracer: Any) -> Any:
        h = model.save()
        return h

    assert run(probe) == (2, 2)


class Probe:
    def __init__(self, scale: int) -> None:
        self.scale = scale

    def method(self, model: Any, tracer: Any) -> Any:
        h = (model * self.scale).save()
        return h

    @classmethod
    def of_class(cls, model: Any, tracer: Any) -> Any:
        h = (model, cls.__name__).save()
        return h

    @staticmethod
    def static(model: Any, tracer: Any) -> Any:
        h = tracer.save()
        return h

    def __call__(self, model: Any, tracer: Any) -> Any:
        h = (tracer * self.scale).save()
        return h


@pytest.mark.parametrize(
    ("probe", "expected"),
    [
        (Probe(4).method, 8),
        (Probe.of_class, (2, "Probe")),
        (Probe.static, 3),
        (Probe(4), 12),
        (functools.partial(Probe(4)), 12),
    ],
    ids=["method", "class method", "static method", "callable object", "partial of an object"],
)
def test_methods_and_objects(probe: Any, expected: object, saves: Any) -> None:
    assert run(probe) == expected
    assert saves == {"h": expected}
    assert from_function(probe).names == ("h",)


def test_a_builtin() -> None:
    assert run(divmod, 7, 2) == (3, 1)


def test_without_source_it_goes_as_it_is() -> None:
    namespace: dict[str, Any] = {}
    exec("def probe(model, tracer):\n    return tracer.save(model)\n", namespace)

    class Tracer:
        def save(self, value: object) -> object:
            return "saved", value

    assert run(namespace["probe"], 2, Tracer()) == ("saved", 2)


def test_recursion() -> None:
    def probe(model: Any, tracer: Any) -> int:
        return 1 if model == 0 else model * probe(model - 1, tracer)

    assert run(probe, 5) == 120


def test_the_block_describes_the_function() -> None:
    block = from_function(saving)

    assert (block.filename, block.first_line) == (__file__, saving.__code__.co_firstlineno)
    assert block.function == "saving"


def test_a_traceback_points_at_the_function() -> None:
    def probe(model: Any, tracer: Any) -> None:
        kept = model.save()
        raise LookupError(kept)

    with pytest.raises(Exception) as caught:  # noqa: PT011 -- outside a block saving itself fails, at that line
        run(probe)
    lines = [entry.tb_lineno for entry in _entries(caught.value) if entry.tb_frame.f_code.co_filename == __file__]
    assert lines[-1] == probe.__code__.co_firstlineno + 1


def _entries(error: BaseException) -> Any:
    entry = error.__traceback__
    while entry is not None:
        yield entry
        entry = entry.tb_next


def test_annotations_and_attributes_travel() -> None:
    def probe(model: int, tracer: str) -> object:
        return None

    probe.mark = "kept"  # type: ignore[attr-defined]
    loaded: Any = load(from_function(probe).payload, resolve)

    assert loaded.__annotations__ == {"model": "int", "tracer": "str", "return": "object"}
    assert (loaded.mark, loaded.__name__) == ("kept", "probe")


@pytest.mark.parametrize("count", [0, 1, 3])
def test_another_number_of_arguments_is_refused(count: int) -> None:
    probe = eval(f"lambda {', '.join('abc'[:count])}: None")

    with pytest.raises(TypeError, match=r"\(model, tracer\)"):
        from_function(probe)


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match=r"function of \(model, tracer\), not 3"):
        from_function(3)  # type: ignore[arg-type]


def test_async_functions_are_refused() -> None:
    async def probe(model: Any, tracer: Any) -> None: ...

    with pytest.raises(CaptureError, match=r"async function.*write it with `def`"):
        from_function(probe)


def test_generator_functions_are_refused() -> None:
    def probe(model: Any, tracer: Any) -> Any:
        yield model

    with pytest.raises(CaptureError, match=r"generator function.*tracer\.stream"):
        from_function(probe)


def test_a_value_that_cannot_travel_is_named() -> None:
    gate = threading.Lock()

    def probe(model: Any, tracer: Any) -> None:
        with gate:
            pass

    with pytest.raises(ShippingError, match=r"'gate', a lock, which cannot travel(.|\n)*create one inside the block"):
        from_function(probe)


def test_a_value_of_the_object_that_cannot_travel_is_named() -> None:
    probe = Probe(3)
    probe.gate = threading.Lock()  # type: ignore[attr-defined]

    with pytest.raises(ShippingError, match=r"'self'.*self\.gate is a lock"):
        from_function(probe.method)
