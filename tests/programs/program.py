"""Small programs of reads and edits: data that Hypothesis draws and shrinks, and that runs as a block."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch

from nnsight_async import OutOfOrderError

LAYERS = 4
WITHIN = (
    "resid_pre",
    "rotary_emb",
    "queries",
    "keys",
    "heads",
    "attention",
    "resid_mid",
    "mlp_input",
    "mlp",
    "hidden",
    "resid_post",
)
"""Places in a layer, in the order in which a forward pass comes to them."""

AFTER = ("norm", "logits", "samples")
"""Places behind the last layer."""

LOCATIONS: dict[str, tuple[Any, ...]] = {
    "resid_pre": ("resid_pre", None),
    "heads": ("self_attn", "heads", "output", None),
    "attention": ("self_attn", "output", None),
    "resid_mid": ("resid_mid", None),
    "mlp_input": ("mlp", "input", None),
    "mlp": ("mlp", "output", None),
    "hidden": ("output", 0),
    "resid_post": ("resid_post", None),
}
"""How a block gets to a place from its layer, and which element of what stands there is meant."""

SKIPPED = ("attention", "mlp", "resid_post")
"""Places at which a module can be skipped."""

FORCES = ("force", "constant")
"""What is done to samples."""

FACTORS = (0.5, -1.0, 1.5, 2.0)
FIRST_ID = 4  # those below are special tokens

Steps = tuple[int | None, int | None, int | None] | int | list[int] | None
"""A slice, a step, several, or None for a body without a loop."""


@dataclass(frozen=True)
class Op:
    """`action` at a place; `number` chooses its noise, factor, token, or the step from which on it is done."""

    layer: int
    name: str
    action: str
    number: int = 0
    when: str = "always"

    @property
    def order(self) -> tuple[int, int]:
        if self.name in AFTER:
            return LAYERS, AFTER.index(self.name)
        return self.layer, WITHIN.index(self.name)

    @property
    def factor(self) -> float:
        return FACTORS[self.number % len(FACTORS)]

    @property
    def token(self) -> int:
        return FIRST_ID + 37 * self.number

    def noise(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(self.number))

    def __str__(self) -> str:
        where = self.name if self.name in AFTER else f"layers[{self.layer}].{self.name}"
        condition = "" if self.when == "always" else f"if {self.when}: "
        return f"{condition}{self.action}({where}, {self.number})"


@dataclass(frozen=True)
class Loop:
    """`for step in tracer.iter[steps]` over a body, in the order of the forward pass."""

    steps: Steps
    body: tuple[Op, ...]

    @property
    def subscript(self) -> Any:
        return slice(*self.steps) if isinstance(self.steps, tuple) else self.steps

    def __str__(self) -> str:
        body = [str(op) for op in self.body] or ["pass"]
        if self.steps is None:
            return "\n".join(body)
        steps = self.steps
        if isinstance(steps, tuple):
            steps = ":".join("" if part is None else str(part) for part in steps)
        return "\n    ".join([f"for step in tracer.iter[{steps}]:", *body])


@dataclass(frozen=True)
class Program:
    """Loops one after the other, and the layers whose outputs are cached from the start."""

    loops: tuple[Loop, ...]
    cached: tuple[int, ...] = ()

    @property
    def looks_at_tokens(self) -> bool:
        return any(op.when == "even token" for loop in self.loops for op in loop.body)

    @property
    def reads_what_it_forces(self) -> bool:
        """Reads a token before it forces another, in one step."""
        actions = [{op.action for op in loop.body if op.name == "samples"} for loop in self.loops]
        return any("read" in each and not each.isdisjoint(FORCES) for each in actions)

    def __str__(self) -> str:
        first = [f"tracer.cache({list(self.cached)})"] if self.cached else []
        return "\n".join([*first, *map(str, self.loops)])


class Planned(Exception):  # noqa: N818 -- what a program raises on purpose
    pass


# -- as a block --------------------------------------------------------------------------------------------------------


@dataclass
class Memory:
    """What a program knows from one step to the next, on the engine and in transformers alike."""

    token: int = 0
    carried: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    def lets(self, op: Op, step: int) -> bool:
        even = {"always": 0, "even step": step, "even token": self.token}[op.when]
        return even % 2 == 0

    def carry(self, value: torch.Tensor) -> None:
        self.carried[tuple(value.shape[1:])] = value[-1]


def block_of(program: Program, prompt_rows: int, prefix: str = "") -> Callable[[Any, Any], None]:
    """The program as a function that can be given to `model.run`; `prefix` begins the names under which it saves."""

    def probe(model: Any, tracer: Any) -> None:
        memory, seen = Memory(), 0
        kept, landed = tracer.save([], f"{prefix}kept"), tracer.save([], f"{prefix}landed")
        if program.cached:
            tracer.save(tracer.cache([model.model.layers[layer] for layer in program.cached]), f"{prefix}cache")
        for at, loop in enumerate(program.loops):
            for step in [0] if loop.steps is None else tracer.iter[loop.subscript]:
                seen += 1
                for number, op in enumerate(loop.body):
                    if memory.lets(op, step):
                        turn = Turn(op, model, tracer, memory, kept, landed, 1 if step else prompt_rows)
                        turn.perform(f"{prefix}read {at}.{number}")
                if program.looks_at_tokens:
                    memory.token = int(model.samples)
        tracer.save(seen, f"{prefix}seen")

    return probe


@dataclass
class Turn:
    """One op in one step."""

    op: Op
    model: Any
    tracer: Any
    memory: Memory
    kept: list[Any]
    landed: list[bool]
    rows: int

    def perform(self, name: str) -> None:
        op = self.op
        match op.action:
            case "read":
                value = self.read()
                self.memory.carry(value)
                self.keep(value, name)
            case "lens":
                model = self.model
                self.keep(model.logits_processor(model.lm_head, model.model.norm(self.read())), name)
            case "late":
                self.keep(self.late(), name)
            case "stop" if self.tracer.step >= op.number:
                self.read()
                self.tracer.stop()
            case "raise" if self.tracer.step >= op.number:
                self.read()
                raise Planned(f"in step {self.tracer.step}")
            case "stop" | "raise":
                pass
            case _:
                edited = self.edit()
                self.landed.append(torch.equal(edited, self.read()))

    def keep(self, value: Any, name: str) -> None:
        self.kept.append(value)
        self.tracer.save(value, name)

    def late(self) -> str:
        self.read()
        try:
            self.model.model.layers[0].resid_pre
        except RuntimeError as error:
            return type(error).__name__
        return "nothing"

    def edit(self) -> torch.Tensor:
        """Edit the value here; returns what should now be read."""
        op = self.op
        if op.action in ("constant", "skip"):
            return self.replace_unseen()
        value = self.read()
        if op.action == "replace":
            value = value * op.factor + op.noise(tuple(value.shape[1:]))
            self.write(value)
        elif op.action == "halves":
            value = self.edit_halves(value)
        elif op.action == "force":
            value[:] = op.token
        elif op.action == "favour":
            value[:, op.token] += 50.0
        else:
            self.change(value)
        return value

    def change(self, value: torch.Tensor) -> None:
        """In place."""
        op, shape = self.op, tuple(value.shape[1:])
        match op.action:
            case "add":
                value += op.noise(shape)
            case "scale":
                value *= op.factor
            case "row":
                value[-1] += op.noise(shape)
            case "carry":
                if shape in self.memory.carried:
                    value += 0.25 * self.memory.carried[shape]
            case _:
                raise AssertionError(op)

    def edit_halves(self, first: torch.Tensor) -> torch.Tensor:
        """Two readings, each changed in a part of its own."""
        second = self.read()
        half = first.shape[-1] // 2
        first[..., :half] += self.op.noise(tuple(first.shape[1:]))[..., :half]
        second[..., half:] *= self.op.factor
        return torch.cat([first[..., :half], second[..., half:]], -1)

    def replace_unseen(self) -> torch.Tensor:
        """Write without reading."""
        op = self.op
        if op.name == "samples":
            value = torch.full((1, 1), op.token)
            self.write(value)
            return value.to(self.read().dtype)
        width = {"logits": (512,), "keys": (64,), "heads": (4, 32)}.get(op.name, (128,))
        rows = 1 if op.name == "logits" else self.rows
        value = op.noise(width).expand(rows, *width).clone()
        if op.action == "constant":
            self.write(value)
        else:
            layer = self.model.model.layers[op.layer]
            match op.name:
                case "attention":
                    layer.self_attn.skip(value)
                case "mlp":
                    layer.mlp.skip(value)
                case _:
                    layer.skip((torch.zeros_like(value), value))
        return value

    def read(self) -> torch.Tensor:
        owner, attribute, element = self.location()
        value = getattr(owner, attribute)
        return value if element is None else value[element]

    def write(self, value: torch.Tensor) -> None:
        owner, attribute, element = self.location()
        if element is None:
            setattr(owner, attribute, value)
        else:
            whole = getattr(owner, attribute)
            setattr(owner, attribute, (*whole[:element], value, *whole[element + 1 :]))

    def location(self) -> tuple[Any, str, int | None]:
        """Whose attribute is read and written, and which element of it."""
        op, root = self.op, self.model.model
        if op.name in ("logits", "samples"):
            return self.model, op.name, None
        if op.name == "norm":
            return root.norm, "output", 0
        layer = root.layers[op.layer]
        if op.name == "rotary_emb":  # all layers share one: in this layer, it is the next to be called
            with suppress(OutOfOrderError):  # it is being visited
                layer.resid_pre
            return root.layers[0].self_attn.rotary_emb, "output", 0
        if op.name in ("queries", "keys"):
            return layer.self_attn.source.rotary_emb_0, "output", int(op.name == "keys")
        *way, attribute, element = LOCATIONS[op.name]
        return reduce(getattr, way, layer), attribute, element
