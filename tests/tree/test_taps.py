"""What `taps=` may say, on the manifest of a toy."""

from __future__ import annotations

import pytest
import torch

from nnsight_async.interleave.locations import Location
from nnsight_async.tree.describe import describe
from nnsight_async.tree.manifest import Manifest
from nnsight_async.tree.taps import resolve
from tests.tree.conftest import Toy


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    return describe(Toy(3), repo="toy", vllm_version="")


OUT = [Location(f"model.layers.{number}", "output") for number in range(3)]


@pytest.mark.parametrize(
    ("tap", "locations"),
    [
        ("model.layers[1].output", [OUT[1]]),
        ("model.layers.1", [OUT[1]]),
        ("model.model.layers[1].output", [OUT[1]]),
        ("model.layers[*].output", OUT),
        ("layers[*]", None),
        ("model.layers[*].act", [Location("model.layers.0.act", "output")]),
        ("model.layers[1].m*", [Location("model.layers.1.mlp", "output")]),
        ("*.layers[0].mlp.input", [Location("model.layers.0.mlp", "inputs")]),
        ("model.layers[0].resid_pre", [Location("model.layers.0", "inputs")]),
        ("model.layers[2].resid_post", [OUT[2]]),
        ("model['layers'][0]", [OUT[0]]),
        ("lm_head.inputs", [Location("lm_head", "inputs")]),
        ("model.layers[1].source.self_mlp_0.output", None),
        ("model.layers[1].source.mlp_0.output", [Location("model.layers.1", "output", "mlp_0")]),
        (
            "model.layers[0].source.*.input",
            [Location("model.layers.0", "inputs", name) for name in ("act_0", "mlp_0", "norm_0")],
        ),
    ],
)
def test_a_tap_stands_for_places_of_the_model(manifest: Manifest, tap: str, locations: list[Location] | None) -> None:
    if locations is None:
        with pytest.raises(ValueError, match="taps: "):
            resolve([tap], manifest)
    else:
        assert list(resolve([tap], manifest)) == locations


def test_every_place_comes_once_in_the_order_of_the_model(manifest: Manifest) -> None:
    assert list(resolve(["model.layers[2]", "model.layers[*].output", "model.layers[0]"], manifest)) == OUT


def test_names_that_were_given_are_known(manifest: Manifest) -> None:
    renamed = manifest.renamed({"model.layers": "blocks", "mlp": "ff"})

    assert resolve(["blocks[1]"], renamed) == (OUT[1],)
    assert resolve(["blocks[1].ff.output"], renamed) == (Location("model.layers.1.mlp", "output"),)


@pytest.mark.parametrize(
    ("tap", "said"),
    [
        ("model.layers[1].mpl", r"did you mean model\.model\.layers\[1\]\.mlp"),
        ("model.layer[1].mlp", "layers"),
        ("model.layers[7].mlp", r"'model.layers\[7\].mlp' is no place"),
        ("model.layers[*].atn", "is no place in the model"),
        ("model.embed.resid_post", "is not a layer"),
        ("model.layers[0].mlp.source.x_0.output", "no operations|no operation 'x_0'"),
        ("model.layers[0].source.nothing_0.output", "it has act_0, mlp_0, norm_0"),
        ("model.layers[2].act", r"read it there"),
        ("model.layers[0].heads[1].q", "holds no attention layer"),
        ("model.layers", "is one of several|cannot be read"),
        (" ", "an empty string"),
    ],
)
def test_what_is_not_there_is_refused_with_what_may_be_meant(manifest: Manifest, tap: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        resolve([tap], manifest)


def test_anything_but_a_list_of_strings_is_refused(manifest: Manifest) -> None:
    for taps in ("model.layers[0]", [3], [torch.nn.Linear(1, 1)]):
        with pytest.raises(TypeError, match="a list of strings"):
            resolve(taps, manifest)  # type: ignore[arg-type]
