"use strict";

// A block as data (docs/serving.md): for each step, one number, saved as `value`.
const read = (part, path = "") => ({ kind: "read", part, path });
const variable = (name) => ({ kind: "variable", name });
const number = (value) => ({ kind: "value", value });
const method = (of, name, ...given) => ({ kind: "method", name, of, arguments: given });
const item = (of, ...keys) => ({ kind: "item", of, keys });
const binary = (left, sign, right) => ({ kind: "binary", sign, left, right });
const bind = (name, value) => ({ kind: "let", name, value });
const save = (value) => ({ kind: "save", name: "value", value: method(value, "item") });

const MEASURES = {
  entropy: () => [
    bind("p", method(method(item(read("logits"), number(0)), "float"), "softmax", number(-1))),
    save({ kind: "negative", of: method(binary(variable("p"), "*", method(method(variable("p"), "clamp_min", number(1e-20)), "log")), "sum") }),
  ],
  chosen: () => [
    bind("p", method(method(item(read("logits"), number(0)), "float"), "softmax", number(-1))),
    save(item(variable("p"), item(read("samples"), number(0), number(0)))),
  ],
  lens: (tree, layer) => [
    bind("h", item(read("resid_post", `${tree.layers}.${layer}`), { kind: "slice", start: number(-1) })),
    bind("lens", item({ kind: "apply", path: tree.processor, arguments: [
      { kind: "module", path: tree.head }, { kind: "apply", path: tree.norm, arguments: [variable("h")] }] }, number(0))),
    bind("drawn", item(read("samples"), number(0), number(0))),
    save(method(binary(variable("lens"), ">", item(variable("lens"), variable("drawn"))), "sum")),
  ],
};

const RANGES = { entropy: (v) => v / 8, chosen: (v) => 1 - v, lens: (v) => Math.log10(v + 1) / 4 };

function statements(measure, tree, layer) {
  return [{ kind: "steps", body: MEASURES[measure](tree, layer) }];
}

// Light where the model is sure, red where it is not.
function colour(measure, value) {
  const part = Math.min(Math.max(RANGES[measure](value), 0), 1);
  return `hsl(${Math.round(120 - 120 * part)} 80% 80%)`;
}

async function* events(response) {
  const decoder = new TextDecoder();
  let held = "";
  for (const reader = response.body.getReader(); ;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += decoder.decode(value, { stream: true });
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
  }
}

async function asked(path, key, body) {
  const headers = { ...(key && { authorization: `Bearer ${key}` }), ...(body && { "content-type": "application/json" }) };
  const answer = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body) });
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  return answer;
}

async function generate(fields, show) {
  const tree = await (await asked("nnsight/v1/tree", fields.key)).json();
  if (fields.measure === "lens" && !tree.layers) throw new Error("this model has no layers that a lens is known for");
  const body = {
    prompt: fields.prompt,
    sampling: { max_tokens: fields.tokens },
    statements: statements(fields.measure, tree, fields.layer),
  };
  for await (const event of events(await asked("nnsight/v1/stream", fields.key, body))) {
    if (event.error) throw new Error(event.error.message);
    if ("text" in event) show(event.text, event.saves.value);
  }
}

if (typeof document !== "undefined") {
  const field = (name) => document.getElementById(name);
  field("form").addEventListener("submit", async (submit) => {
    submit.preventDefault();
    field("output").replaceChildren();
    field("error").textContent = "";
    const measure = field("measure").value;
    try {
      await generate({
        prompt: field("prompt").value, tokens: Number(field("tokens").value), measure,
        layer: Number(field("layer").value), key: field("key").value,
      }, (text, value) => {
        const token = document.createElement("span");
        token.textContent = text;
        token.title = String(value);
        token.style.background = colour(measure, value);
        field("output").append(token);
      });
    } catch (error) {
      field("error").textContent = error.message;
    }
  });
}

if (typeof module !== "undefined") module.exports = { statements, colour, events };
