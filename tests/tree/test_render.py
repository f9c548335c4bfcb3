from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import torch

from nnsight_async.testing import hf_model
from nnsight_async.tree.describe import describe
from nnsight_async.tree.envoy import Envoy

TOY = """\
Toy
  (model): Inner
    (embed): Embedding(7, 4)  weight [7, 4] f32
    (layers): ModuleList  [not readable: a container is not called; read its items]
      (0-2): 3 x Layer
        (norm): LayerNorm((4,), eps=1e-05, elementwise_affine=True, bias=True)  weight [4] f32  bias [4] f32
        (mlp): Linear(in_features=4, out_features=4, bias=True)  weight [4, 4] f32  bias [4] f32
        (act): GELU(approximate='none')  [shared by 3 paths; read it at model.model.layers[0].act]
        (unused): Linear(in_features=4, out_features=2, bias=True)  weight [2, 4] f32  bias [2] f32
    (output): Linear(in_features=4, out_features=4, bias=True)  weight [4, 4] f32  bias [4] f32
  (lm_head): Linear(in_features=4, out_features=7, bias=False)  weight [7, 4] f32"""


class Balance(HTMLParser):
    """Fails on tags that do not match, and collects the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def parsed(html: str) -> Balance:
    balance = Balance()
    balance.feed(html)
    assert balance.open == []
    return balance


def test_the_tree_reads_like_a_print_of_torch_with_sizes(toy: Any) -> None:
    assert repr(Envoy(describe(toy))) == TOY


def test_a_part_of_the_tree_starts_with_its_name(toy: Any) -> None:
    text = repr(Envoy(describe(toy)).model.layers[1].mlp)

    assert text == "(mlp): Linear(in_features=4, out_features=4, bias=True)  weight [4, 4] f32  bias [4] f32"


def test_layers_that_differ_are_not_folded(toy: Any) -> None:
    toy.model.layers[1].mlp = torch.nn.Linear(4, 4, bias=False)

    text = repr(Envoy(describe(toy)))

    assert [line.strip() for line in text.splitlines() if "Layer" in line and "Norm" not in line] == [
        "(0): Layer",
        "(1): Layer",
        "(2): Layer",
    ]


def test_shards_show_the_whole(toy: Any) -> None:
    class ColumnParallelLinear(torch.nn.Linear):
        tp_size, output_size, output_size_per_partition = 2, 14, 7

    toy.lm_head = ColumnParallelLinear(4, 7, bias=False)

    assert repr(Envoy(describe(toy))).endswith("weight [7, 4] of [14, 4] f32, split along 0")


def test_html_is_nested_details_with_the_same_lines() -> None:
    envoy = Envoy(describe(hf_model("llama")))

    html = parsed(envoy._repr_html_())

    assert html.tags == {"div", "details", "summary"}
    for line in html.text.split("\n"):
        assert line.split("(", 2)[0] in repr(envoy)
    assert "(0-3): 4 x LlamaDecoderLayer" in html.text


def test_html_escapes_what_modules_say(toy: Any) -> None:
    toy.lm_head.extra_repr = lambda: "<script>alert(1)</script>"

    html = Envoy(describe(toy))._repr_html_()

    assert "script" not in parsed(html).tags
    assert "&lt;script&gt;" in html
