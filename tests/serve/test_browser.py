"""The page at `/`, in headless Chromium (Debian's package `chromium`)."""

from __future__ import annotations

import asyncio
import colorsys
import itertools
import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch
import websockets

from nnsight_async.testing import hf_model
from tests.serve.conftest import key

pytestmark = pytest.mark.slow

TOKENS = 6
GENERATED = """async (fields) => {
  const plain = window.fetch;
  let heard = null;
  window.fetch = async (...given) => {
    const answer = await plain(...given);
    if (String(given[0]).endsWith("stream")) heard = answer.clone().text();
    return answer;
  };
  for (const [name, value] of Object.entries(fields)) document.getElementById(name).value = value;
  document.querySelector("button").click();
  const output = document.getElementById("output"), error = document.getElementById("error");
  const over = () => output.children.length == Number(fields.tokens) || error.textContent;
  while (!over()) await new Promise((next) => setTimeout(next, 20));
  window.fetch = plain;
  const shown = (span) => [span.textContent, span.title, getComputedStyle(span).backgroundColor];
  return JSON.stringify({ spans: [...output.children].map(shown), error: error.textContent, heard: await heard });
}"""


_numbers = itertools.count(1)


class Page:
    """One page in a browser, over the DevTools protocol."""

    def __init__(self, socket: Any, session: str | None) -> None:
        self._socket = socket
        self._session = session
        self.complaints: list[str] = []

    async def ask(self, method: str, **params: Any) -> Any:
        number = next(_numbers)
        session = {} if self._session is None else {"sessionId": self._session}
        await self._socket.send(json.dumps({"id": number, "method": method, "params": params, **session}))
        async for message in self._socket:
            said = json.loads(message)
            if said.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown"):
                self.complaints.append(message)
            if said.get("id") == number:
                return said["result"]
        raise ConnectionError("the browser has gone")

    async def value(self, expression: str) -> Any:
        result = await self.ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def generate(self, **fields: str) -> dict[str, Any]:
        """What the page shows when its form has been filled in and sent."""
        async with asyncio.timeout(60):
            return json.loads(await self.value(f"({GENERATED})({json.dumps(fields)})"))


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a browser can be spoken to."""
    command = shutil.which("chromium")
    assert command is not None, "these tests need Chromium"
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0")
    profile = f"--user-data-dir={tmp_path_factory.mktemp('profile')}"
    with subprocess.Popen([command, *options, profile, "about:blank"], stderr=subprocess.PIPE, text=True) as browser:
        assert browser.stderr is not None
        yield next(line.split()[-1] for line in browser.stderr if "DevTools listening on " in line)
        browser.terminate()


@pytest.fixture
async def opened(address: str) -> AsyncIterator[Callable[[str], Any]]:
    """Opens a page."""
    async with websockets.connect(address, max_size=None) as socket:

        async def opened(url: str) -> Page:
            browser = Page(socket, None)
            target = (await browser.ask("Target.createTarget", url="about:blank"))["targetId"]
            session = (await browser.ask("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
            page = Page(socket, session)
            for domain in ("Page", "Runtime", "Log"):
                await page.ask(f"{domain}.enable")
            await page.ask("Page.navigate", url=url)
            async with asyncio.timeout(30):
                while await page.value("document.readyState + document.title") != "completennsight_async":  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            return page

        yield opened


def distributions(ids: list[int], drawn: list[int]) -> torch.distributions.Categorical:
    with torch.no_grad():
        logits = hf_model("llama")(torch.tensor([ids + drawn])).logits[0, len(ids) - 1 : -1]
    return torch.distributions.Categorical(logits=logits)


@pytest.mark.parametrize("measure", ["entropy", "chosen"])
async def test_each_token_has_the_colour_of_its_value(opened, data_server, vllm_model, measure):
    page = await opened(data_server.url)
    prompt = "The page"
    shown = await page.generate(prompt=prompt, tokens=str(TOKENS), measure=measure)
    assert shown["error"] == ""
    events = [json.loads(part[6:]) for part in shown["heard"].split("\n\n") if part.startswith("data: ")]
    tokens = [event for event in events if "id" in event]
    drawn = [token["id"] for token in tokens]
    found = distributions(vllm_model.tokenizer(prompt)["input_ids"], drawn)
    expected = found.entropy() if measure == "entropy" else found.log_prob(torch.tensor(drawn)).exp()
    assert [text for text, _, _ in shown["spans"]] == [token["text"] for token in tokens]
    values = torch.tensor([float(title) for _, title, _ in shown["spans"]])
    torch.testing.assert_close(values, expected, rtol=1e-3, atol=1e-4)
    for value, (_, _, colour) in zip(values.tolist(), shown["spans"], strict=True):
        part = min(max(value / 8 if measure == "entropy" else 1 - value, 0), 1)
        red, green, _ = (channel * 255 for channel in colorsys.hls_to_rgb(round(120 - 120 * part) / 360, 0.8, 0.8))
        assert colour.startswith("rgb(")
        got = [int(number) for number in colour[4:-1].split(",")]
        assert abs(got[0] - red) <= 2
        assert abs(got[1] - green) <= 2
    assert page.complaints == []


async def test_a_lens_of_a_layer(opened, data_server):
    page = await opened(data_server.url)
    shown = await page.generate(prompt="The page", tokens="3", measure="lens", layer="1")
    assert shown["error"] == ""
    assert all(float(title) >= 0 and float(title).is_integer() for _, title, _ in shown["spans"])
    assert len(shown["spans"]) == 3
    missing = await page.generate(prompt="The page", tokens="3", measure="lens", layer="99")
    assert "model.layers" in missing["error"]


async def test_a_server_with_keys_says_so_on_the_page(opened, guarded_server):
    page = await opened(guarded_server.url)
    refused = await page.generate(prompt="The page", tokens="2", measure="chosen", key="wrong")
    assert "asks for a key" in refused["error"]
    assert refused["spans"] == []
    shown = await page.generate(prompt="The page", tokens="2", measure="chosen", key=key("eve"))
    assert len(shown["spans"]) == 2
    hostile = await page.generate(prompt="<img src=x onerror=alert(1)>", tokens="1", measure="entropy", key=key("eve"))
    assert hostile["error"] == ""
    assert await page.value("document.querySelectorAll('img, script:not([src])').length") == 0
