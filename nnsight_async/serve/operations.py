"""Blocks as data: the few things that a server does for anyone who may run requests on it.

A block is a list of statements, each of which runs in the order in which it stands, in the step that the request is in.
There are no functions, no attributes but those that are named here, and no loop but the one over steps, so that what a
block can do is to read, compute with, change and save values of its own request.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec

from nnsight_async.errors import LocationError
from nnsight_async.interleave.locations import expression
from nnsight_async.serve import wire
from nnsight_async.tree.manifest import Manifest
from nnsight_async.tree.names import missing

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Path = Annotated[str, msgspec.Meta(max_length=500)]
Line = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]

PARTS = ("output", "input", "inputs", "resid_pre", "resid_mid", "resid_post")
Part = Literal["output", "input", "inputs", "resid_pre", "resid_mid", "resid_post", "logits", "samples"]

Sign = Literal["+", "-", "*", "/", "//", "%", "@", "==", "!=", "<", "<=", ">", ">=", "&", "|"]
InPlace = Literal["=", "+", "-", "*", "/"]

METHODS = frozenset(
    """
    abs all amax amin any argmax argmin argsort bfloat16 bool clamp clamp_max clamp_min clone cos cpu cumsum detach diff
    div dot double exp flatten float floor half int isnan item log log_softmax logsumexp long matmul max mean min mul
    nan_to_num ndim neg norm numel outer permute prod relu reshape round rsqrt sigmoid sign sin size softmax sort sqrt
    square squeeze std sub sum t tanh tolist topk transpose unsqueeze var view where
    """.split()  # noqa: SIM905  twenty lines otherwise
)
"""Of tensors: those whose result is no larger than what they are given, which neither name files nor run code."""

DTYPES = frozenset(wire.DTYPES)
ATTRIBUTES = frozenset(("shape", "ndim", "T", "mT"))
FUNCTIONS = frozenset(("len", "abs", "max", "min", "float", "int", "round", "sum", "list", "cat", "stack", "where"))

MOST = 2000
"""Statements and expressions that a block may have."""
DEEPEST = 40


class _Node(msgspec.Struct, tag_field="kind", forbid_unknown_fields=True):
    """A part of a block."""


class Value(_Node, tag="value"):
    """A value that travels with the block, as `wire.pack` gives it."""

    value: Any


class Variable(_Node, tag="variable"):
    """What `let` has named."""

    name: Name


class Read(_Node, tag="read"):
    """What passes at a location; `logits` and `samples` have no path."""

    part: Part
    path: Path = ""


class Step(_Node, tag="step"):
    """The number of the step."""


class Item(_Node, tag="item"):
    """`of[keys]`."""

    of: Expression
    keys: list[Key]


class Slice(_Node, tag="slice"):
    """`start:stop:step`, as a key."""

    start: Expression | None = None
    stop: Expression | None = None
    step: Expression | None = None


class Rest(_Node, tag="rest"):
    """`...`, as a key."""


class Binary(_Node, tag="binary"):
    """Two values and what stands between them."""

    sign: Sign
    left: Expression
    right: Expression


class Negative(_Node, tag="negative"):
    """`-of`."""

    of: Expression


class Method(_Node, tag="method"):
    """`of.name(arguments)`, for one of `METHODS`, `to` with a dtype, and `append` of a list."""

    name: Name
    of: Expression
    arguments: list[Expression] = []
    keywords: dict[str, Expression] = {}


class Attribute(_Node, tag="attribute"):
    """`of.name`, for one of `ATTRIBUTES`."""

    name: Name
    of: Expression


class Function(_Node, tag="function"):
    """`name(arguments)`, for one of `FUNCTIONS`."""

    name: Name
    arguments: list[Expression] = []
    keywords: dict[str, Expression] = {}


class Apply(_Node, tag="apply"):
    """A module, called with values outside the forward pass: a logit lens is `logits_processor(lm_head, norm(x))`.

    An argument may be a `Module`, which only the model's own code gets to see.
    """

    path: Path
    arguments: list[Expression | Module]


class Module(_Node, tag="module"):
    """A module as an argument of `Apply`."""

    path: Path


class Display(_Node, tag="display"):
    """A list or a tuple of values."""

    items: list[Expression] = []
    fixed: bool = False
    """Whether it is a tuple."""


class Let(_Node, tag="let"):
    """`name = value`."""

    name: Name
    value: Expression
    line: Line = 0


class Save(_Node, tag="save"):
    """Save a value under a name."""

    name: Name
    value: Expression
    line: Line = 0


class Change(_Node, tag="change"):
    """`place = value`, `place += value` and so on, for an item of a value, a location, or a variable."""

    place: Item | Read | Variable
    by: InPlace
    value: Expression
    line: Line = 0


class Do(_Node, tag="do"):
    """An expression for what it does: waiting for a location, or `append`."""

    value: Expression
    line: Line = 0


class Steps(_Node, tag="steps"):
    """Statements for each of these steps, as the generation comes to them; `only` are numbers instead of a range."""

    body: list[Statement]
    start: Annotated[int, msgspec.Meta(ge=0)] = 0
    stop: Annotated[int, msgspec.Meta(ge=0)] | None = None
    stride: Annotated[int, msgspec.Meta(ge=1)] = 1
    only: list[Annotated[int, msgspec.Meta(ge=0)]] | None = None
    name: Name | None = None
    """Of the variable that has the number."""
    line: Line = 0


class If(_Node, tag="if"):
    """Statements that run if a value is true, and others if not."""

    test: Expression
    body: list[Statement]
    otherwise: list[Statement] = []
    line: Line = 0


class Skip(_Node, tag="skip"):
    """Have `value` be what a module returns."""

    path: Path
    value: Expression
    line: Line = 0


class Stop(_Node, tag="stop"):
    """End the request at this step."""

    line: Line = 0


Expression = Value | Variable | Read | Step | Item | Binary | Negative | Method | Attribute | Function | Apply | Display
Key = Expression | Slice | Rest
Statement = Let | Save | Change | Do | Steps | If | Skip | Stop


def nodes(part: Any, depth: int = 0) -> Iterator[_Node]:
    """All parts of a block, in the order of the text; `ValueError` where they are too deep in one another."""
    if depth > DEEPEST:
        raise ValueError(f"a block whose expressions are more than {DEEPEST} deep in one another")
    if isinstance(part, _Node):
        yield part
        for field in part.__struct_fields__:
            if field != "value" or not isinstance(part, Value):
                yield from nodes(getattr(part, field), depth + 1)
    elif isinstance(part, (list, dict)):
        for each in part.values() if isinstance(part, dict) else part:  # pyright: ignore[reportUnknownVariableType]
            yield from nodes(each, depth)


def check(statements: list[Statement], manifest: Manifest) -> None:
    """Raise `ValueError` or `LocationError` for a block that names what there is not, or that is too long."""
    for count, node in enumerate(nodes(statements), 1):
        if count > MOST:
            raise ValueError(f"a block of more than {MOST} statements and expressions")
        _check_names(node)
        path = getattr(node, "path", None)
        if path is not None and not (isinstance(node, Read) and node.part in ("logits", "samples")):
            _check_path(path, manifest)
        if isinstance(node, Apply):
            _check_stateless(node.path, manifest)


def _check_names(node: _Node) -> None:
    known: dict[type[_Node], frozenset[str]] = {
        Method: METHODS | {"to", "append"},
        Attribute: ATTRIBUTES,
        Function: FUNCTIONS,
    }
    allowed = known.get(type(node))
    name = getattr(node, "name", "")
    if allowed is not None and name not in allowed:
        raise ValueError(f"{type(node).__name__.lower()} {name!r} is none of those that a block may use as data")
    keywords = getattr(node, "keywords", {})
    if keywords.keys() - KEYWORDS:
        raise ValueError(f"{name}() takes none of {sorted(keywords.keys() - KEYWORDS)} in a block that is data")


KEYWORDS = frozenset(("dim", "keepdim", "k", "min", "max", "dtype", "descending", "largest", "p", "unbiased"))


STATELESS = re.compile("Norm|Linear|LMHead|Embedding|LogitsProcessor|SiluAndMul|GeluAndMul|GELU|SiLU|MLP|Conv1D")
"""Classes of modules that compute from their arguments alone. An attention layer that is called by itself would write
into the key-value cache of whoever is in the batch."""


def _check_stateless(path: str, manifest: Manifest) -> None:
    within = [info for name, info in manifest.modules.items() if name == path or name.startswith(f"{path}.")]
    for info in within:
        if not STATELESS.search(info.cls) or "Attention" in info.cls:
            raise ValueError(
                f"{expression(path)} has a {info.cls} in it, and a block that is data can only call norms, embeddings, "
                "linear layers, MLPs and the logits processor"
            )


def _check_path(path: str, manifest: Manifest) -> None:
    if path not in manifest.modules:
        parent, _, name = path.rpartition(".")
        while parent and parent not in manifest.modules:
            parent, _, name = parent.rpartition(".")
        raise LocationError(missing(manifest, parent, name))
