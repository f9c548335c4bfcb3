"""vLLM's OpenAI-compatible API on the same port and the same engine, and what else is there."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai import AsyncOpenAI

from nnsight_async import VLLM
from nnsight_async.serve import page
from nnsight_async.testing import hf_model
from nnsight_async.testing.engine import drained
from nnsight_async.testing.oracle import generation
from tests.serve.conftest import key

PROMPT = [5, 17, 101, 9, 33, 250, 77]
STEPS = 6
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module")
def hf() -> Any:
    return hf_model("llama")


@pytest.fixture
async def openai(guarded_server: Any) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{guarded_server.url}/v1", api_key=key("eve")) as client:
        yield client


async def test_the_official_client_streams_while_traces_run(openai, guarded_server, llama, hf, vllm_model):
    plain = generation(hf, PROMPT, STEPS)
    (model_id,) = [each.id async for each in await openai.models.list()]

    async def completed() -> str:
        stream = await openai.completions.create(
            model=model_id,
            prompt=PROMPT,
            max_tokens=STEPS,
            temperature=0.0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def traced(model: VLLM) -> torch.Tensor:
        async with model.trace(PROMPT, max_tokens=STEPS, temperature=0.0, ignore_eos=True) as tracer:
            for _ in tracer.iter[:]:
                hidden = model.model.layers[2].resid_post[-1].save()
        return torch.stack([token.saves["hidden"] async for token in tracer.stream()])

    async with VLLM(llama, mode="async", serve=guarded_server.url, api_key=key("eve")) as model:
        found = await asyncio.gather(*[f() for _ in range(4) for f in (completed, lambda: traced(model))])
    text = vllm_model.tokenizer.decode(plain.ids).rstrip("\N{REPLACEMENT CHARACTER}")  # of which vLLM says nothing
    for at, result in enumerate(found):
        if at % 2:
            torch.testing.assert_close(result, plain.streams[2][len(PROMPT) - 1 :], **CLOSE)
        else:
            assert result == text


async def test_requests_of_the_openai_api_run_the_edits(openai, guarded_server, llama):
    (model_id,) = [each.id async for each in await openai.models.list()]

    def always(model: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            model.samples[:] = 7

    async def ids() -> str:
        answer = await openai.completions.create(model=model_id, prompt=PROMPT, max_tokens=3, temperature=0.0)
        return answer.choices[0].text

    async with VLLM(llama, mode="async", serve=guarded_server.url, api_key=key("ann")) as model:
        before = await ids()
        edit = await model.edit(always)
        assert await ids() == model.tokenizer.decode([7, 7, 7])
        await edit.clear()
        assert await ids() == before


async def test_what_else_is_there(data_server, vllm_model):
    await drained(vllm_model)
    async with httpx.AsyncClient(base_url=data_server.url, timeout=60) as http:
        assert (await http.get("/health")).status_code == 200
        assert "# HELP" in (await http.get("/metrics")).text
        schema = (await http.get("/openapi.json")).json()
        assert {"/nnsight/v1/runs", "/nnsight/v1/edits", "/v1/completions"} <= schema["paths"].keys()
        tree = (await http.get("/nnsight/v1/tree")).json()
        assert tree == {
            "layers": "model.layers", "count": 4, "norm": "model.norm", "head": "lm_head",
            "processor": "logits_processor",
        }  # fmt: skip
        assert (await http.get("/nnsight/v1/stats")).json()["runs"] == 0


NODE = shutil.which("node")
SCRIPT = Path(page.__file__).with_name("page.js")
COLOURS = """
const { statements, colour, events } = require(process.argv[1]);
const tree = JSON.parse(process.argv[2]);
const out = {};
for (const measure of ["entropy", "chosen", "lens"]) out[measure] = statements(measure, tree, 2);
out.colours = [colour("entropy", 0), colour("entropy", 8), colour("chosen", 1), colour("lens", 0)];
(async () => {
  const texts = ['data: {"a', '": 1}\\n\\n: alive\\n\\ndata: {"b"', ': 2}\\n\\n'];
  const pieces = texts.map((text) => new TextEncoder().encode(text));
  const body = new ReadableStream({ start(c) { pieces.forEach((p) => c.enqueue(p)); c.close(); } });
  out.events = [];
  for await (const event of events({ body })) out.events.push(event);
  console.log(JSON.stringify(out));
})();
"""


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    """What the page's own script makes."""
    assert NODE is not None, "the page's script is tested with Node.js"
    tree = {"layers": "model.layers", "norm": "model.norm", "head": "lm_head", "processor": "logits_processor"}
    told = subprocess.run(
        [NODE, "-e", COLOURS, str(SCRIPT), json.dumps(tree)], capture_output=True, check=True, text=True
    )
    made: dict[str, Any] = json.loads(told.stdout)
    return made


async def test_the_page_shows_what_its_script_asks_for(data_server, hf, script):
    """No browser here: the script is run by Node.js, and its requests are sent as it makes them."""
    plain = generation(hf, PROMPT, STEPS)
    rows = torch.stack([hf.lm_head(hf.model.norm(row)) for row in plain.streams[2][len(PROMPT) - 1 :]])
    p = plain.logits.softmax(-1)
    expected = {
        "entropy": torch.distributions.Categorical(p).entropy().tolist(),
        "chosen": [p[at, token].item() for at, token in enumerate(plain.ids)],
        "lens": [int((row > row[token]).sum()) for row, token in zip(rows, plain.ids, strict=True)],
    }
    sampling = {"max_tokens": STEPS, "temperature": 0.0, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=data_server.url, timeout=60) as http:
        for measure, values in expected.items():
            body = {"prompt": PROMPT, "sampling": sampling, "statements": script[measure]}
            answer = await http.post("/nnsight/v1/stream", json=body)
            events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
            assert [event["id"] for event in events[:-1]] == plain.ids
            assert [event["saves"]["value"] for event in events[:-1]] == pytest.approx(values, rel=1e-3, abs=1e-4)
    assert script["colours"] == ["hsl(120 80% 80%)", "hsl(0 80% 80%)", "hsl(120 80% 80%)", "hsl(120 80% 80%)"]
    assert script["events"] == [{"a": 1}, {"b": 2}]


async def test_the_example(vllm_model, hf, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    import serve_steering

    texts = await serve_steering.main(vllm_model, strength=8.0, tokens=6)
    ids = vllm_model.tokenizer(serve_steering.PROMPT).input_ids
    last = [hidden_of(hf, vllm_model.tokenizer(word).input_ids) for word in (" sunny", " rainy")]
    toward = last[0] - last[1]
    vector = 8.0 * toward / toward.norm() * toward.norm().clamp(min=1.0)
    for name, edits in (("plain", None), ("steered", {2: lambda hidden: hidden + vector})):
        wanted = vllm_model.tokenizer.decode(generation(hf, ids, 6, edits).ids).rstrip("\N{REPLACEMENT CHARACTER}")
        assert texts[name] == wanted


def hidden_of(hf: Any, ids: list[int]) -> torch.Tensor:
    return generation(hf, ids, 1).streams[2][len(ids) - 1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"vllm_xargs": {"edits": 5}},
        {"vllm_xargs": {"edits": ["no-such"]}},
        {"top_k": 1 << 64},
        {"top_k": 1 << 70},
        {"stop": "\ud83d"},
        {"stop_token_ids": [1 << 40], "min_tokens": 1},
        {"logit_bias": {"-3": 1.0}},
        {"allowed_token_ids": [-1]},
        {"prompt": [-1]},
        {"prompt": [1 << 40]},
    ],
    ids=lambda wrong: "-".join(wrong),
)
async def test_what_the_engine_could_not_take_is_the_mistake_of_its_request(guarded_server, vllm_model, llama, wrong):
    body = json.dumps({"model": llama, "prompt": PROMPT, "max_tokens": 2, **wrong})
    headers = {"authorization": f"Bearer {key('eve')}", "content-type": "application/json"}
    async with httpx.AsyncClient(base_url=guarded_server.url, headers=headers, timeout=60) as http:
        answer = await http.post("/v1/completions", content=body)
    assert answer.status_code == 400, answer.text
    (output,) = await vllm_model.generate([PROMPT], max_tokens=1)
    assert output.finished
