"""What the fuzzer sends: values, blocks of data, blocks of Python and requests, right and wrong ones.

Drawn by hand, and not by Hypothesis: that takes some hundred times as long for blocks, and these are small as they are.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any, get_args

import msgspec
import torch

from nnsight_async.runs.keywords import OTHERS, PLAIN
from nnsight_async.serve import messages as m
from nnsight_async.serve import operations as ops
from nnsight_async.serve import wire
from nnsight_async.serve.wire import DTYPES
from tests.serve.test_program import MANIFEST

MADE = [name for name in DTYPES if name not in ("complex32", "float8_e8m0fnu")]
INTEGERS = [0, 1, -1, 2, 255, 1 << 31, -(1 << 31), (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63)]
LARGE = [1 << 64, -(1 << 63) - 1, 1 << 70, 3**2000]
FLOATS = [0.0, -0.0, 0.5, 1.0, 1e308, -2.5, float("inf"), float("-inf"), float("nan"), 1e-320]
TEXTS = [
    "",
    "a",
    "x",
    "float32",
    "mean",
    "\0",
    "\n",
    "ä",
    "\u2028",
    "\U0001f600",
    "../..",
    "__class__",
    "a" * 300,
    "1e5",
]
BYTES = [b"", b"\x00", b"\xff\xfe", b"\x80\x04.", bytes(40)]
PATHS = [*MANIFEST.modules]
NO_PATHS = ["model", "layers.9", "layers.0.norm.weight", "..", "layers..0", "\0"]
METHODS = [*sorted(ops.METHODS), "to", "append"]
NO_METHODS = ["__class__", "numpy", "add_", "expand"]
FUNCTIONS = [*sorted(ops.FUNCTIONS)]
NO_FUNCTIONS = ["eval", "open", "zeros"]
KEYWORDS = [*sorted(ops.KEYWORDS)]
NO_KEYWORDS = ["out", "device"]
READ = [
    ops.Read("output", "layers.1"),
    ops.Read("output", "layers.2.mlp"),
    ops.Read("input", "layers.2"),
    ops.Read("logits"),
]
BODIES = [
    "    x = y\n",
    "    save(y)\n    z = [y]\n",
    "",
    "    return 1\n",
    "    yield\n",
    "    x = (\n",
    "\0",
    "    nonlocal y\n",
    "  x\n y\n",
    "    x = 1\nelse:\n    y = 2\n",
    "    global y\n    y = 1\n",
    "    import nothing\n",
    "    x = '\ufffd'\n",
    "    class A:\n        __y = 1\n",
    "    x = y if 1 else\n",
    "    print(y)\n" * 50,
    "    await y\n",
    "    x = y.save()\n",
    "\t x\n",
    "    match y:\n        case [_, *x]:\n            x.save()\n",
    "    f'{y!r:>{x}}'\n",
    "    *x, = y\n",
    "    x: int\n",
]
NAMES = ["y", "save", "model", "__y", "ä", "a b", "", "class", "None", "x" * 600, "*a", "__debug__", "__class__"]


class Draw(random.Random):
    """Draws one example."""

    def some(self, draw: Callable[[], Any], most: int) -> list[Any]:
        return [draw() for _ in range(self.randint(0, most))]

    def rarely(self, share: float = 0.1) -> bool:
        return self.random() < share

    def mostly(self, right: Sequence[Any], wrong: Sequence[Any], share: float = 0.03) -> Any:
        return self.choice(wrong if self.rarely(share) else right)

    def by(self, *each: Callable[[], Any]) -> Any:
        return self.choice(each)()

    def maybe(self, draw: Callable[[], Any]) -> Any:
        return draw() if self.rarely(0.5) else None

    # -- values --------------------------------------------------------------------------------------------------------

    def text(self) -> str:
        if self.rarely():
            return "".join(chr(self.choice([*range(128), 0x3B1, 0x20AC, 0x1F600])) for _ in range(self.randint(0, 9)))
        return self.choice(TEXTS)

    def number(self) -> Any:
        return self.by(
            lambda: self.randint(-5, 5),
            lambda: self.choice(FLOATS),
            lambda: self.choice(INTEGERS),
            lambda: self.rarely(0.5),
        )

    def tensor(self) -> torch.Tensor:
        shape = [self.choice([0, 1, 2, 3, 8]) for _ in range(self.randint(0, 3))]
        return torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(self.randrange(1 << 30))).to(
            DTYPES[self.choice(MADE)]
        )

    def leaf(self) -> Any:
        return self.by(
            self.text,
            self.number,
            self.number,
            self.tensor,
            lambda: None,
            lambda: self.choice(BYTES),
            lambda: self.choice(LARGE),
        )

    def value(self, depth: int = 0) -> Any:
        """All that a message can hold."""
        if depth > 3 or self.rarely(0.5):
            return self.leaf()
        parts = self.some(lambda: self.value(depth + 1), 4)
        keys = [self.by(self.text, lambda: self.randint(-9, 9), lambda: (1, self.text())) for _ in parts]
        return self.choice([parts, tuple(parts), dict(zip(keys, parts, strict=True))])

    def jsonlike(self, depth: int = 0) -> Any:
        if depth > 3 or self.rarely(0.5):
            return self.by(self.text, self.number, lambda: None)
        parts = self.some(lambda: self.jsonlike(depth + 1), 4)
        return parts if self.rarely(0.5) else {self.text(): part for part in parts}

    def packed(self, depth: int = 0) -> Any:
        """What might be a value as it is sent, and mostly is none."""
        if self.rarely(0.3):
            return wire.pack(self.value(), [])
        if depth > 3 or self.rarely(0.5):
            return self.by(self.text, self.number, lambda: None, lambda: self.choice(BYTES))
        head = self.choice([0, 1, 2, 3, 4, 5, -1, "0", None])
        return [head, *self.some(lambda: self.packed(depth + 1), 3)]

    # -- blocks of data ------------------------------------------------------------------------------------------------

    def name(self) -> str:
        return self.choice("xyz")

    def path(self) -> str:
        return self.mostly(PATHS, NO_PATHS)

    def read(self) -> ops.Read:
        return (
            copy.copy(self.choice(READ)) if self.rarely(0.7) else ops.Read(self.choice(get_args(ops.Part)), self.path())
        )

    def constant(self) -> ops.Value:
        wild = self.rarely()
        return ops.Value(
            self.value()
            if wild
            else self.by(self.number, self.tensor, lambda: self.choice([0, 1, -1, None, "float16", "mean"]))
        )

    def expression(self, depth: int = 0) -> Any:
        if depth > 3 or self.rarely(0.3):
            return self.by(
                lambda: ops.Variable(self.name()), lambda: ops.Variable("x"), self.read, self.constant, ops.Step
            )
        inner = lambda: self.expression(depth + 1)  # noqa: E731
        return self.by(
            lambda: ops.Item(inner(), self.some(lambda: self.key(inner), 3)),
            lambda: ops.Binary(self.choice(get_args(ops.Sign)), inner(), inner()),
            lambda: ops.Binary(self.choice("+-*/"), inner(), inner()),
            lambda: ops.Negative(inner()),
            lambda: ops.Method(self.mostly(METHODS, NO_METHODS), inner(), self.some(inner, 2), self.keywords(inner)),
            lambda: ops.Method(self.mostly(METHODS, NO_METHODS), ops.Variable("x")),
            lambda: ops.Attribute(self.mostly(sorted(ops.ATTRIBUTES), ["grad", "__dict__"]), inner()),
            lambda: ops.Function(self.mostly(FUNCTIONS, NO_FUNCTIONS), self.some(inner, 3), self.keywords(inner)),
            lambda: ops.Apply(self.path(), self.some(lambda: self.by(inner, lambda: ops.Module(self.path())), 2)),
            lambda: ops.Display(self.some(inner, 3), self.rarely(0.5)),
        )

    def key(self, inner: Callable[[], Any]) -> Any:
        def ends() -> Any:
            return self.maybe(lambda: self.by(inner, lambda: ops.Value(self.randint(-3, 3))))

        return self.by(
            inner,
            ops.Rest,
            lambda: ops.Slice(ends(), ends(), ends()),
            lambda: ops.Value(self.randint(-3, 3)),
            lambda: ops.Value(None),
        )

    def keywords(self, inner: Callable[[], Any]) -> dict[str, Any]:
        return {self.mostly(KEYWORDS, NO_KEYWORDS): inner() for _ in range(self.choice([0, 0, 0, 1, 2]))}

    def place(self) -> Any:
        return self.by(
            self.read,
            lambda: ops.Variable(self.name()),
            lambda: ops.Item(
                self.by(self.read, lambda: ops.Variable(self.name())),
                [self.key(self.expression) for _ in range(self.randint(1, 2))],
            ),
        )

    def statement(self, depth: int = 0) -> Any:
        inner = lambda most: self.some(lambda: self.statement(depth + 1), most) if depth < 3 else []  # noqa: E731
        return self.by(
            lambda: ops.Let(self.name(), self.expression()),
            lambda: ops.Save(self.name(), self.expression(), self.randint(0, 1000)),
            lambda: ops.Save(self.name(), ops.Variable(self.name())),
            lambda: ops.Change(self.place(), self.choice(get_args(ops.InPlace)), self.expression()),
            lambda: ops.Do(self.expression()),
            lambda: ops.Do(ops.Method("append", ops.Variable("y"), [self.expression()])),
            lambda: ops.Skip(self.path(), self.expression()),
            ops.Stop if self.rarely() else lambda: ops.Do(self.read()),
            lambda: ops.If(self.expression(), inner(3), inner(2)),
            lambda: ops.Steps(
                inner(3),
                self.randint(0, 2),
                self.maybe(lambda: self.randint(0, 4)),
                self.randint(1, 2),
                name=self.maybe(self.name),
            ),
        )

    def program(self) -> list[Any]:
        begun = [ops.Let("x", copy.copy(READ[0])), ops.Let("y", ops.Display([])), ops.Let("z", ops.Value(2))]
        return [*(begun if self.rarely(0.9) else ()), *self.some(self.statement, 5)]

    # -- blocks of Python ----------------------------------------------------------------------------------------------

    def outer(self) -> m.Outer:
        if self.rarely(0.05):
            return self.by(
                lambda: m.Value(
                    msgspec.Raw(self.choice([b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x91" * 2000 + b"\x01"]))
                ),
                lambda: m.Module([]),
                lambda: m.Import("x" * 501),
            )
        return self.by(
            lambda: m.Value(msgspec.Raw(msgspec.msgpack.encode(self.packed()))),
            lambda: m.Module(["module", self.path()]),
            lambda: m.Import(self.choice(["torch", "math", "no_such_module", ""]), self.choice(["", "sqrt", "a.b"])),
            lambda: m.Pickled() if self.rarely(0.2) else m.Module(["model"]),
        )

    def source(self) -> m.Source:
        def around() -> dict[str, m.Outer]:
            return {self.mostly("xyz", NAMES, 0.1): self.outer() for _ in range(self.randint(0, 2))}

        return m.Source(
            text=self.text() if self.rarely() else self.choice(BODIES),
            filename=self.mostly(["f.py", "", "<b>"], ["\0", "x" * 5000]),
            first_line=self.mostly([1, 2, 1_000_000], [0, -1, 1_000_001]),
            lines=(1, self.randint(0, 9)),
            parameters=["model", "tracer"] if not self.rarely(0.03) else self.some(lambda: self.choice(NAMES), 3),
            free=around(),
            entries=around(),
            function=self.mostly(["f", "<lambda>", ""], ["\0"]),
            qualname=self.choice(["f", "A.f", ""]),
            class_name=self.mostly([None, "A"], NAMES),
            annotations=self.rarely(0.5),
            module=self.mostly(["", "__main__", "a.b"], ["\0", "..."]),
            constants=[self.choice([bytes(32), bytes(3)])] if self.rarely(0.05) else [],
        )

    # -- requests ------------------------------------------------------------------------------------------------------

    def setting(self) -> Any:
        return self.by(
            self.number,
            self.text,
            lambda: None,
            lambda: self.some(self.number, 3),
            lambda: self.some(self.text, 3),
            lambda: {self.by(self.text, self.number): self.number() for _ in range(2)},
            self.jsonlike,
            lambda: self.choice(LARGE[:3]),
        )

    def likely(self) -> dict[str, Any]:
        each: dict[str, Callable[[], Any]] = {
            "temperature": lambda: self.choice([0, 0.0, 0.5, 1, 2.0]),
            "max_tokens": lambda: self.randint(1, 20),
            "min_tokens": lambda: self.randint(0, 3),
            "top_p": lambda: self.choice([0.1, 0.9, 1]),
            "top_k": lambda: self.randint(-1, 50),
            "min_p": lambda: self.choice([0, 0.1]),
            "seed": lambda: self.randint(0, 100),
            "stop": lambda: self.choice(["a", ["b", "c"], []]),
            "stop_token_ids": lambda: self.some(lambda: self.randint(0, 500), 3),
            "bad_words": lambda: self.some(lambda: "bad", 2),
            "logprobs": lambda: self.randint(0, 5),
            "prompt_logprobs": lambda: self.randint(0, 5),
            "logit_bias": lambda: {self.randint(0, 500): self.uniform(-3, 3)},
            "allowed_token_ids": lambda: [self.randint(0, 500)],
            "ignore_eos": lambda: self.rarely(0.5),
            "detokenize": lambda: self.rarely(0.5),
            "skip_special_tokens": lambda: self.rarely(0.5),
            "repetition_penalty": lambda: self.uniform(0.5, 2),
            "presence_penalty": lambda: self.uniform(-2, 2),
        }
        return {name: each[name]() for name in self.sample(sorted(each), self.randint(0, 4))}

    def sampling(self) -> dict[str, Any]:
        names = [*sorted(PLAIN), *sorted(OTHERS), "lora_request", "edits", "priority", "x"]
        wrong = {self.choice(names): self.setting() for _ in range(self.choice([0, 1, 1, 2]))}
        return {**self.likely(), **(wrong if self.rarely(0.3) else {})}

    def prompt(self) -> Any:
        return self.by(
            self.text, lambda: "a prompt", lambda: [self.randint(1, 500) for _ in range(self.randint(0, 70))]
        )

    def identity(self) -> str:
        return self.choice(["", "0" * 31, "G" * 32, "../etc"]) if self.rarely(0.03) else self.randbytes(16).hex()

    def declared(self) -> tuple[Any, list[torch.Tensor]]:
        """A block as a client sends it, and its tensors."""
        statements, tensors = packed(self.program())
        return {"type": "declared", "statements": statements}, tensors

    def run(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """A request for a run; one in three has something of another type, or something more."""
        each: dict[str, Callable[[], Any]] = {
            "edits": lambda: self.some(lambda: self.choice(["known", "other", ""]), 2),
            "priority": lambda: self.choice([0, 1, -1, *INTEGERS]),
            "lora": lambda: self.mostly([None, "adapter"], ["/etc/passwd"], 0.1),
            "cache_salt": self.text,
            "names": lambda: self.some(self.name, 3),
        }
        asked = {"type": "run", "id": self.identity(), "prompt": self.prompt(), "sampling": self.sampling()}
        asked |= {name: draw() for name, draw in each.items() if self.rarely(0.3)}
        block, tensors = self.declared() if self.rarely(0.5) else (None, [])
        return {**asked, "block": block, **self.wrong([*asked, "more"])}, tensors

    def edit(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        block, tensors = self.declared()
        asked = {"type": "edit", "id": self.identity(), "block": block, "rowwise": self.rarely(0.5)}
        asked |= {"name": self.text()} if self.rarely(0.5) else {}
        return {**asked, **self.wrong([*asked, "more"])}, tensors

    def wrong(self, names: list[str]) -> dict[str, Any]:
        return {self.choice(names): self.jsonlike()} if self.rarely(0.2) else {}

    def plain_run(self) -> dict[str, Any]:
        """A request for a run as JSON."""
        statements = self.by(list, self.jsonlike, lambda: msgspec.to_builtins(for_json(self.program())))
        asked = {"prompt": self.prompt(), "sampling": self.sampling(), "statements": statements}
        return {**asked, **self.wrong([*asked, "edits", "more"])}


def packed(statements: list[Any]) -> tuple[list[Any], list[torch.Tensor]]:
    """Statements as a client sends them, and their tensors."""
    copied = copy.deepcopy(statements)
    tensors: list[torch.Tensor] = []
    for node in ops.nodes(copied):
        if isinstance(node, ops.Value):
            node.value = wire.pack(node.value, tensors)
    return copied, tensors


def for_json(statements: list[Any]) -> list[Any]:
    """Statements whose values JSON has."""
    copied = copy.deepcopy(statements)
    for node in ops.nodes(copied):
        if isinstance(node, ops.Value) and not isinstance(node.value, (bool, float, str, type(None))):
            node.value = [1.0, 2.0]
    return copied
