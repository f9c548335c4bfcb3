"""The same programs, with hooks in transformers: what they should read, and what should be drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count, islice
from typing import Any

import torch
from transformers.models.llama import modeling_llama

from tests.programs.program import FORCES, LAYERS, Loop, Memory, Op, Program

Step = list[tuple[str, Op]]
"""What a program does in one step, each op with its name."""


class Stopped(Exception):  # noqa: N818
    pass


class Replay:
    """A program over a given sequence of tokens, one forward pass per step with a key-value cache.

    `reads` has by step what was read, by name; `logits` those that tokens are drawn from; `forced` the tokens that the
    program draws itself, by step; `stopped` and `raised` the step in which it did.
    """

    def __init__(self, hf: Any, program: Program | None, prompt: Sequence[int], ids: Sequence[int], steps: int) -> None:
        self.reads: list[dict[str, Any]] = []
        self.kept: list[Any] = []
        self.cached: list[dict[int, torch.Tensor]] = []
        self.logits: list[torch.Tensor] = []
        self.forced: dict[int, int] = {}
        self.seen = 0
        self.stopped: int | None = None
        self.raised: int | None = None
        self._hf = hf
        self._program = program or Program(())
        self._memory = Memory()
        self._plan = plan(self._program, steps)
        self._step = 0
        self._drawn: torch.Tensor = torch.empty(0)
        self._run([*prompt], [*ids], steps)

    @torch.no_grad()
    def _run(self, prompt: list[int], ids: list[int], steps: int) -> None:
        past: Any = None
        with self._hooked():
            for step in range(steps):
                self._step = step
                self.reads.append({})
                self.cached.append({})
                bodies = self._plan[step] if self.stopped is None and self.raised is None else []
                self._todo = [op for body in bodies for op in body]
                self.seen += len(bodies)
                rows = prompt if step == 0 else [ids[step - 1]]
                out = self._hf(torch.tensor([rows]), past_key_values=past, use_cache=True)
                past = out.past_key_values
                logits = self._at(LAYERS, ("logits",), out.logits[0, -1:])
                self.logits.append(logits[0])
                drawn = torch.tensor([[ids[step] if step < len(ids) else -1]])
                self._drawn = drawn
                after = self._at(LAYERS, ("samples",), self._before_edits(logits, drawn))
                if step in self.forced:
                    self.forced[step] = int(after)
                if bodies:
                    self._memory.token = int(after)

    def _before_edits(self, logits: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        """The token that is drawn, before the program forces another."""
        ops = [op for _, op in self._todo if op.name == "samples" and self._memory.lets(op, self._step)]
        return logits.argmax(-1, keepdim=True) if any(op.action in FORCES for op in ops) else drawn

    def _at(self, layer: int, names: Sequence[str], value: torch.Tensor) -> torch.Tensor:
        """The forward pass is at these places of a layer with `value`; returns what it goes on with."""
        for name in names:
            while self._todo and self._todo[0][1].name == name and self._todo[0][1].layer in (layer, LAYERS):
                key, op = self._todo.pop(0)
                if self._memory.lets(op, self._step):
                    value = self._done(key, op, value)
        return value

    def _done(self, key: str, op: Op, value: torch.Tensor) -> torch.Tensor:
        match op.action:
            case "read":
                self._memory.carry(value.clone())
                self._keep(key, value.clone())
            case "lens":
                self._keep(key, self._hf.lm_head(self._hf.model.norm.forward(value)))
            case "late":
                self._keep(key, "OutOfOrderError")
            case "stop" if self._step >= op.number:
                self.stopped, self._todo = self._step, []
            case "raise" if self._step >= op.number:
                self.raised, self._todo = self._step, []
            case "stop" | "raise":
                pass
            case action if op.name == "samples" and action in FORCES:
                self.forced[self._step] = op.token
                return torch.full_like(value, op.token)
            case _:
                return edited(value, op, self._memory)
        return value

    def _keep(self, key: str, value: Any) -> None:
        self.reads[-1][key] = value
        self.kept.append(value)

    # -- hooks -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        with ExitStack() as stack:
            for number, layer in enumerate(self._hf.model.layers):
                for handle in self._hooks(number, layer):
                    stack.callback(handle.remove)
            stack.callback(self._hf.model.norm.register_forward_hook(self._after(LAYERS, ("norm",))).remove)
            stack.enter_context(self._rotating())
            yield

    def _hooks(self, number: int, layer: Any) -> list[Any]:
        return [
            layer.register_forward_pre_hook(self._before(number, ("resid_pre",))),
            layer.self_attn.o_proj.register_forward_pre_hook(self._before_heads(number)),
            layer.self_attn.register_forward_hook(self._after(number, ("attention",))),
            layer.post_attention_layernorm.register_forward_pre_hook(self._middle(number)),
            layer.mlp.register_forward_pre_hook(self._before(number, ("mlp_input",))),
            layer.mlp.register_forward_hook(self._after(number, ("mlp", "hidden"))),
            layer.register_forward_hook(self._after(number, ("resid_post",))),
        ]

    def _before(self, number: int, names: Sequence[str]) -> Callable[..., Any]:
        return lambda module, args: (self._at(number, names, args[0][0])[None], *args[1:])

    def _before_heads(self, number: int) -> Callable[..., Any]:
        def hook(module: Any, args: Any) -> Any:
            rows = args[0][0]
            return (self._at(number, ("heads",), rows.view(len(rows), 4, 32)).reshape(rows.shape)[None],)

        return hook

    def _middle(self, number: int) -> Callable[..., Any]:
        def hook(module: Any, args: Any) -> None:
            args[0][0] = self._at(number, ("resid_mid",), args[0][0].clone())  # in place: it is the stream itself

        return hook

    def _after(self, number: int, names: Sequence[str]) -> Callable[..., Any]:
        def hook(module: Any, args: Any, output: Any) -> Any:
            hidden = output[0] if isinstance(output, tuple) else output
            changed = self._at(number, names, hidden[0])[None]
            if "resid_post" in names:
                self.cached[-1][number] = changed[0]
            return (changed, *output[1:]) if isinstance(output, tuple) else changed

        return hook

    @contextmanager
    def _rotating(self) -> Iterator[None]:
        original, calls = modeling_llama.apply_rotary_pos_emb, 0

        def rotate(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            number, calls = calls % LAYERS, calls + 1
            q, k = original(*args, **kwargs)
            queries = self._at(number, ("rotary_emb", "queries"), rows_of(q))
            return heads_of(queries, q), heads_of(self._at(number, ("keys",), rows_of(k)), k)

        modeling_llama.apply_rotary_pos_emb = rotate
        try:
            yield
        finally:
            modeling_llama.apply_rotary_pos_emb = original


def edited(value: torch.Tensor, op: Op, memory: Memory) -> torch.Tensor:
    """What an op makes of a value, as arithmetic."""
    shape = tuple(value.shape[1:])
    match op.action:
        case "add":
            return value + op.noise(shape)
        case "scale":
            return value * op.factor
        case "row":
            return torch.cat([value[:-1], value[-1:] + op.noise(shape)])
        case "replace":
            return value * op.factor + op.noise(shape)
        case "constant" | "skip":
            return op.noise(shape).expand_as(value)
        case "carry":
            return value + 0.25 * memory.carried[shape] if shape in memory.carried else value
        case "halves":
            half = shape[-1] // 2
            return torch.cat([value[..., :half] + op.noise(shape)[..., :half], value[..., half:] * op.factor], -1)
        case "favour":
            return value + 50.0 * torch.nn.functional.one_hot(torch.tensor(op.token), shape[-1])
    raise AssertionError(op)


def rows_of(heads: torch.Tensor) -> torch.Tensor:
    """`[1, heads, tokens, size]` as `[tokens, heads * size]`."""
    return heads[0].transpose(0, 1).flatten(1)


def heads_of(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    _, heads, tokens, size = like.shape
    return rows.view(tokens, heads, size).transpose(0, 1)[None]


def plan(program: Program, steps: int) -> list[list[Step]]:
    """The bodies that run in each of `steps` steps."""
    planned: list[list[Step]] = [[] for _ in range(steps)]
    first = 0
    for at, loop in enumerate(program.loops):
        body = [(f"read {at}.{number}", op) for number, op in enumerate(loop.body)]
        for step in numbers(loop):
            if step >= steps:  # waited for until the generation ends, and nothing after it has its turn before that
                return planned
            if step >= first:
                planned[step].append(body)
                first = step + 1
    return planned


def numbers(loop: Loop) -> Iterable[int]:
    match loop.steps:
        case None:
            return [0]
        case int(step):
            return [step]
        case list(several):
            return sorted(several)
        case start, stop, stride:
            return islice(count(), start, stop, stride)
