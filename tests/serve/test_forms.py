"""Blocks of declared operations that need not run, on a server."""

from __future__ import annotations

from typing import Any

import torch

from nnsight_async import VLLM
from nnsight_async.serve import operations as ops
from nnsight_async.serve.forms import forms

PROMPT = [5, 17, 101]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}


def plain(vector: torch.Tensor) -> Any:
    def block(model: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            model.model.layers[1].output[0][-1] += 2 * vector
            hidden = model.model.layers[2].resid_post[-1].save()
            logits = model.logits.save()

    return block


def computed(vector: torch.Tensor) -> Any:
    """The same with a method, whose result is not known from the text."""

    def block(model: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            model.model.layers[1].output[0][-1] += 2 * vector
            hidden = model.model.layers[2].resid_post[-1].clone().save()
            logits = model.logits.save()

    return block


async def test_a_client_s_block_need_not_run(client: Any, vllm_model: Any) -> None:
    vector = torch.linspace(-1, 1, 128)
    before = (await vllm_model.stats())["planned"]
    found = await client.run(PROMPT, plain(vector), **GREEDY).saves
    assert (await vllm_model.stats())["planned"] == before + 1
    expected = await client.run(PROMPT, computed(vector), **GREEDY).saves
    assert (await vllm_model.stats())["planned"] == before + 1

    torch.testing.assert_close(found, expected)


def test_what_has_no_such_form() -> None:
    read = ops.Read("output", "model.layers.1")
    assert forms([ops.Save("x", read)]) == (
        ("save", 0, None, ("constant", "x"), ("attribute", ("module", "model.layers.1"), "output"), None),
    )
    for statement in (
        ops.Save("x", ops.Method("norm", read)),
        ops.Steps([ops.Steps([])]),
        ops.Steps([], only=[1]),
        ops.If(read, []),
        ops.Change(read, "=", read),
        ops.Let(".model", read),
    ):
        assert forms([statement]) is None
    assert forms([ops.Steps([]), ops.Save("x", read)]) is None


async def test_a_block_of_python_need_not_run_either(open_server: Any, llama: str, vllm_model: Any) -> None:
    before = (await vllm_model.stats())["planned"]
    async with VLLM(llama, mode="async", serve=open_server.url) as model:
        async with model.trace(PROMPT, **GREEDY) as tracer:
            layer = model.model.layers[1]
            for _ in tracer.iter[:]:
                mlp = layer.mlp.output[-1].save()
        values = [value async for value in mlp.stream()]
        assert (await vllm_model.stats())["planned"] == before + 1
        async with model.trace(PROMPT, **GREEDY) as runs:
            for _ in runs.iter[:]:
                same = torch.clone(model.model.layers[1].mlp.output[-1]).save()
        expected = [value async for value in same.stream()]
        assert (await vllm_model.stats())["planned"] == before + 1
    torch.testing.assert_close(values, expected)
