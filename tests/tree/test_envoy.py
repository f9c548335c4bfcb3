from __future__ import annotations

import copy
import timeit
from typing import TYPE_CHECKING, Any

import pytest
import torch

import nnsight_async
from nnsight_async.errors import (
    CaptureError,
    ItemError,
    LocationError,
    NotAListError,
    NotATapError,
    OutsideBlockError,
    UnreadableError,
)
from nnsight_async.tree.envoy import Envoy
from nnsight_async.tree.heads import Heads
from nnsight_async.tree.manifest import TAKEN
from nnsight_async.tree.model import ModelView

if TYPE_CHECKING:
    from nnsight_async.tree.manifest import Manifest

Run = "Callable[[Callable[[], Any]], Any]"


@pytest.fixture
def model(manifest: Manifest) -> Envoy:
    return Envoy(manifest)


def test_reading_asks_the_running_block(model: Envoy, in_block: Any, context: Any) -> None:
    layer = model.model.layers[1]

    values = in_block(lambda: (layer.output, layer.mlp.input, layer.inputs))

    assert values == ("model.model.layers[1].output", "model.model.layers[1].mlp.input", "model.model.layers[1].inputs")


def test_writing_tells_the_running_block(model: Envoy, in_block: Any, context: Any) -> None:
    def block() -> None:
        model.model.layers[0].output = 1
        model.model.layers[0].input = 2
        model.model.layers[0].inputs = 3

    in_block(block)

    path = "model.model.layers[0]"
    assert context.asked == [
        ("write", f"{path}.output", 1),
        ("write", f"{path}.input", 2),
        ("write", f"{path}.inputs", 3),
    ]


def test_an_augmented_assignment_reads_and_writes(model: Envoy, in_block: Any, context: Any) -> None:
    def block() -> None:
        model.lm_head.output += "!"

    in_block(block)

    assert context.asked == [
        ("read", "model.lm_head.output"),
        ("write", "model.lm_head.output", "model.lm_head.output!"),
    ]


def test_lists_have_the_manners_of_lists(model: Envoy) -> None:
    layers = model.model.layers

    assert len(layers) == 3
    assert list(layers) == [layers[0], layers[1], layers[2]]
    assert layers[-1] is layers[2]
    assert layers[1:] == [layers[1], layers[2]]
    assert layers["1"] is layers[1]
    with pytest.raises(ItemError, match=r"model\.model\.layers\[3\] does not exist: .* has 3 items"):
        layers[3]


def test_only_lists_have_the_manners_of_lists(model: Envoy) -> None:
    assert model
    for wrong in (lambda: len(model), lambda: list(model), lambda: model[0]):
        with pytest.raises(NotAListError, match="not a list; its children: model, lm_head"):
            wrong()


def test_children_are_the_same_object_every_time(model: Envoy) -> None:
    assert model.model.layers[1].mlp is model.model.layers[1].mlp
    assert model["model"] is model.model


def test_a_child_with_the_name_of_an_attribute_of_ours_is_an_item(model: Envoy, in_block: Any) -> None:
    inner = model.model

    assert in_block(lambda: inner.output) == "model.model.output"
    assert in_block(lambda: inner["output"].output) == 'model.model["output"].output'


def test_a_path_may_be_had_at_the_root_under_the_last_of_its_names(manifest: Manifest) -> None:
    model = Envoy(manifest.renamed({"model.layers": "layers", "mlp": "feed_forward"}))

    assert model.layers is model.layers
    assert model.layers[1].feed_forward.__block_reference__() == model.model.layers[1].mlp.__block_reference__()
    assert model.model.layers.__block_reference__() == ("module", "model.layers")


@pytest.mark.parametrize(
    ("renames", "why"),
    [
        ({"model.layers": "lm_head"}, "'lm_head' is the name of a module already"),
        ({"mlp": "norm"}, "'norm' is the name of a module already"),
        ({"model.layers": "two words"}, "'two words' is not a name"),
        ({"mlp": "class"}, "'class' is not a name"),
        ({"mlp": "_info"}, "'_info' is not a name"),
        ({"mlp": "inputs"}, "'inputs' would hide"),
        ({"model.layers": "trace"}, "'trace' would hide"),
        ({"mlp": "weight"}, "'weight' would hide"),
        ({"mlp": "part", "model.layers": "part"}, "'part' is given to several modules"),
    ],
)
def test_a_new_name_that_means_something_else_there_is_refused(
    manifest: Manifest, renames: dict[str, str], why: str
) -> None:
    with pytest.raises(ValueError, match=f"rename: {why}"):
        manifest.renamed(renames)


def test_what_modules_and_models_have_is_known_as_taken() -> None:
    kinds = (Envoy, ModelView, nnsight_async.VLLM, nnsight_async.TransformersModel)
    assert {name for kind in kinds for name in dir(kind) if not name.startswith("_")} <= TAKEN


def test_outside_a_block_nothing_is_read(model: Envoy) -> None:
    with pytest.raises(OutsideBlockError):
        model.lm_head.output
    with pytest.raises(OutsideBlockError):
        model.lm_head.output = 1
    with pytest.raises(OutsideBlockError):
        model.lm_head(torch.ones(4))


def test_calling_applies_the_module(model: Envoy, in_block: Any, toy: Any) -> None:
    x = torch.ones(2, 4)

    assert torch.equal(in_block(lambda: model.lm_head(x)), toy.lm_head(x))
    assert torch.equal(in_block(lambda: model.lm_head(input=x)), toy.lm_head(x))


def test_inside_a_block_attributes_of_the_module_are_there(model: Envoy, in_block: Any, toy: Any) -> None:
    assert in_block(lambda: model.lm_head.weight) is toy.lm_head.weight
    assert in_block(lambda: model.scale) == 3
    with pytest.raises(LocationError):
        model.scale


@pytest.mark.parametrize(
    ("path", "name", "suggestion"),
    [
        ("", "layers", r"did you mean model\.model\.layers\?"),
        ("", "lm_haed", r"did you mean model\.lm_head\?"),
        ("", "norm", r"did you mean model\.model\.layers\[0\]\.norm"),
        ("model", "outputs", r'did you mean model\.model\["output"\]'),
        ("lm_head", "outptu", r"has no 'outptu'; did you mean model\.lm_head\.output\?"),
        ("lm_head", "inptu", r"did you mean model\.lm_head\.input"),
        ("lm_head", "wieght", r"did you mean model\.lm_head\.weight\?"),
        ("lm_head", "sourse", r"did you mean model\.lm_head\.source\?"),
        ("model.layers.1", "resid_pots", r"did you mean model\.model\.layers\[1\]\.resid_post"),
        ("model.layers.1", "nrom", r"did you mean model\.model\.layers\[1\]\.norm\?"),
        ("lm_head", "xyzzy", r"it has no children"),
        ("", "xyzzy", r"it has model, lm_head"),
    ],
)
def test_a_wrong_name_gets_the_nearest_ones(
    manifest: Manifest, in_block: Any, path: str, name: str, suggestion: str
) -> None:
    envoy = Envoy(manifest, path)

    for attempt in (lambda: getattr(envoy, name), lambda: envoy[name], lambda: in_block(lambda: getattr(envoy, name))):
        with pytest.raises(LocationError, match=suggestion):
            attempt()
    assert not hasattr(envoy, name)


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("logit", r"model \(Toy\) has no 'logit'; did you mean model\.logits\?"),
        ("sampels", r"did you mean model\.samples\?"),
        ("lm_heda", r"did you mean model\.lm_head\?"),
        ("layers", r"did you mean model\.model\.layers\?"),
        ("xyzzy", r"it has model, lm_head"),
    ],
)
def test_a_wrong_name_of_a_whole_model(manifest: Manifest, in_block: Any, name: str, suggestion: str) -> None:
    model = ModelView(Envoy(manifest))

    for attempt in (lambda: getattr(model, name), lambda: in_block(lambda: getattr(model, name))):
        with pytest.raises(LocationError, match=suggestion):
            attempt()


def test_a_wrong_name_cannot_be_set_in_a_block(manifest: Manifest, in_block: Any, context: Any) -> None:
    model = ModelView(Envoy(manifest))

    with pytest.raises(LocationError, match=r"model\.logit cannot be set in a block; did you mean model\.logits\?"):
        in_block(lambda: setattr(model, "logit", 1))
    in_block(lambda: setattr(model, "logits", 1))
    assert context.asked == [("write", "model.logits", 1)]


def test_a_parameter_is_read_in_a_block_alone(model: Envoy) -> None:
    with pytest.raises(LocationError, match=r"model\.lm_head\.weight is a parameter .* inside a block"):
        model.lm_head.weight


def test_what_only_the_caller_has(manifest: Manifest, in_block: Any) -> None:
    model = ModelView(Envoy(manifest))

    with pytest.raises(CaptureError, match=r"model\.trace cannot be used in a block(.|\n)*tracer\.invoke\(prompt\)"):
        in_block(lambda: model.trace("prompt"))
    with pytest.raises(OutsideBlockError, match=r"`tokenizer = model\.tokenizer`"):
        in_block(lambda: model.tokenizer)


def test_what_cannot_be_read_is_refused_with_its_reason(model: Envoy, in_block: Any) -> None:
    def write() -> None:
        model.model.layers.output = 1

    with pytest.raises(UnreadableError, match="a container is not called"):
        in_block(lambda: model.model.layers.output)
    with pytest.raises(UnreadableError, match="a container is not called"):
        in_block(write)
    with pytest.raises(UnreadableError, match=r"read it there"):
        in_block(lambda: model.model.layers[1].act.input)


def test_a_refusal_of_the_block_arrives_as_it_was_raised(model: Envoy, in_block: Any, context: Any) -> None:
    def refuse(location: Any) -> Any:
        raise NotATapError(f"{location} is not a tap")

    context.read = refuse

    with pytest.raises(NotATapError, match=r"lm_head\.input is not a tap"):
        in_block(lambda: model.lm_head.input)
    with pytest.raises(LocationError, match="did you mean"):
        in_block(lambda: model.lm_haed)


@pytest.mark.parametrize("name", ["lm_head", "weight", "_path"])
def test_nothing_else_can_be_set(model: Envoy, name: str) -> None:
    with pytest.raises(
        LocationError, match=r"cannot be set; output, input, inputs, resid_pre, resid_mid, resid_post can"
    ):
        setattr(model, name, 1)


@pytest.mark.parametrize(("name", "meant"), [("outputs", "output"), ("outptu", "output"), ("resid_pots", "resid_post")])
def test_a_slip_in_what_is_set_gets_the_nearest(model: Envoy, name: str, meant: str) -> None:
    with pytest.raises(
        LocationError, match=rf"model\.lm_head\.{name} cannot be set; did you mean model\.lm_head\.{meant}\?"
    ):
        setattr(model.lm_head, name, 1)


def test_a_slip_in_what_is_set_of_heads(manifest: Manifest) -> None:
    heads = Heads(manifest, "lm_head")
    with pytest.raises(LocationError, match=r"model\.lm_head\.heads\.outputs cannot be set; did you .*heads\.output\?"):
        heads.outputs = 1  # type: ignore[attr-defined]
    with pytest.raises(LocationError, match=r"model\.lm_head\.heads\[1\]\.w cannot be set; output, q, k, v can"):
        heads[1].w = 1  # type: ignore[attr-defined]
    with pytest.raises(NotAListError, match="are not iterated over"):
        list(heads)
    for kind, refined in ((ItemError, IndexError), (NotAListError, TypeError)):
        assert issubclass(kind, (refined, LocationError, AttributeError, nnsight_async.NNsightError))


def test_a_subclass_is_inherited_by_the_children_and_may_add_writable_properties(manifest: Manifest) -> None:
    class WithSkip(Envoy):
        @property
        def skip(self) -> Any: ...

        @skip.setter
        def skip(self, value: Any) -> None:
            self.__dict__["_skipped"] = value

    layer = WithSkip(manifest).model.layers[0]
    layer.skip = 5

    assert layer.__dict__["_skipped"] == 5


def test_travels_by_name_and_can_be_copied(model: Envoy) -> None:
    layer = model.model.layers[2]

    assert layer.__block_reference__() == ("module", "model.layers.2")
    assert copy.copy(layer).mlp.__block_reference__() == ("module", "model.layers.2.mlp")
    assert copy.deepcopy(layer).__block_reference__() == layer.__block_reference__()


def test_dir_lists_children_and_ours(model: Envoy) -> None:
    assert {"model", "lm_head", "output", "inputs"} <= set(dir(model))


def test_reading_costs_next_to_nothing(model: Envoy, in_block: Any, context: Any) -> None:
    context.read = lambda location: location

    def block() -> float:
        return min(timeit.repeat(lambda: model.model.layers[2].output, number=1000, repeat=20)) / 1000

    assert in_block(block) < 5e-6  # 0.4 us where this was written; the bound only catches work done per access
