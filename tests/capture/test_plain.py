"""Which blocks are of few forms, and what their text says."""

from __future__ import annotations

import ast
from textwrap import dedent

import pytest

from nnsight_async.capture.plain import plain

LAYER = ("item", ("attribute", ("attribute", ("name", "model"), "model"), "layers"), ("constant", 3))


def forms(text: str):
    return plain(ast.parse(dedent(text)).body)


def test_a_loop_that_reads_changes_and_saves():
    found = forms("""
        acts = [].save()
        for step in tracer.iter[2:]:
            model.model.layers[3].output[0][-1, :4] += 2 * v
            h = model.model.layers[3].output.save()
            acts.append(h)
    """)
    assert found == (
        ("list", 2, "acts", None),
        (
            "steps", 3, "step", ("name", "tracer"), ("slice", ("constant", 2), None, None),
            (
                (
                    "change", 4, "+",
                    (
                        "item", ("item", ("attribute", LAYER, "output"), ("constant", 0)),
                        ("keys", (("negative", ("constant", 1)), ("slice", None, ("constant", 4), None))),
                    ),
                    ("binary", "*", ("constant", 2), ("name", "v")),
                ),
                ("save", 5, None, ("constant", "h"), ("attribute", LAYER, "output"), "h"),
                ("append", 6, "acts", ("name", "h")),
            ),
        ),
    )  # fmt: skip


def test_what_is_saved_by_a_function_and_loops_over_modules():
    found = forms("""
        for number, layer in enumerate(layers):
            save(layer.output, f"h{number}")
        tracer.save(model.logits, name="logits")
    """)
    assert found == (
        (
            "each", 2, ("number", "layer"), ("name", "layers"),
            (
                (
                    "save", 3, ("function", ("name", "save")), ("text", (("constant", "h"), ("name", "number"))),
                    ("attribute", ("name", "layer"), "output"), None,
                ),
            ),
        ),
        (
            "save", 4, ("method", ("name", "tracer")), ("constant", "logits"),
            ("attribute", ("name", "model"), "logits"), None,
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "h = f(layer.output).save()",
        "h = layer.output.norm().save()",
        "if x: h = layer.output.save()",
        "h = layer.output[layer.output > 0].save()",
        "h = (layer.output if x else y).save()",
        "h = [layer.output].save()",
        "h = layer.output.save().norm()",
        "layer.output = v",
        "layer.output[0][:] **= 2",
        "layer.output[0][:] += v @ w",
        "x.y.append(layer.output)",
        "a, b = layer.output.save()",
        "a = b = layer.output.save()",
        "for step in tracer.iter[:]: pass\nh = layer.output.save()",
        "for step in tracer.iter[:]:\n  for other in tracer.iter[:]: pass",
        "for layer in layers:\n  for step in tracer.iter[:]: pass",
        "for step in tracer.iter[:]: pass\nelse: pass",
        "for step, layer in tracer.iter[:]: pass",
        "while x: pass",
        "try: h = layer.output.save()\nfinally: pass",
        "h = layer.output.__class__",
        "save(layer.output, f'{number:02}')",
        "h = (x := layer.output).save()",
        "global h\nh = layer.output.save()",
        "h = layer.output.save('name')",
        "print(layer.output)",
        "h = True",
    ],
)
def test_anything_else_is_python(text):
    assert forms(text) is None


def test_private_names_of_a_class_are_python():
    body = ast.parse("h = layer.output.save()").body
    assert plain(body) is not None
    assert plain(body, "Some") is None
