"""Sampling parameters as a client without vLLM has them: their names are checked here, their values by the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nnsight_async.engine.settings import check_names
from nnsight_async.errors import UnsupportedError
from nnsight_async.runs.keywords import ALIASES, OTHERS, PLAIN, named
from nnsight_async.runs.ops import ops_of
from nnsight_async.runs.request import Request


@dataclass(slots=True)
class Params:
    """What was asked for; `n` and `seed` are here because sequences of a prompt are runs of their own."""

    given: dict[str, Any]
    n: int = 1
    seed: int | None = None
    extra_args: dict[str, Any] | None = None

    def sampling(self) -> dict[str, Any]:
        """The parameters of one sequence, for the server."""
        seeded = {} if self.seed is None else {"seed": self.seed}
        return {**{name: value for name, value in self.given.items() if name not in ("n", "seed")}, **seeded}


def request_of(options: Mapping[str, Any], what: str) -> Request:
    """A request without a prompt, from the keywords of `trace` and the like; `TypeError` for an unknown one."""
    given = named(options, what)
    lora, priority, edits = given.pop("lora_request", None), given.pop("priority", 0), given.pop("edits", None)
    ops = ops_of(given.pop("ops", None), what)
    check_names(given, [*PLAIN, *OTHERS, *ALIASES], what)
    for name in sorted(OTHERS & given.keys()):
        raise UnsupportedError(f"{what} got {name}=, which a served model does not take")
    if lora is not None and not isinstance(lora, str):
        raise UnsupportedError("a served model takes the name of an adapter that its server has: lora_request='name'")
    n = given.get("n", 1)
    if type(n) is not int or n < 1:
        raise ValueError(f"n must be at least 1, got {n!r}.")
    if n > 1 and given.get("temperature") == 0:
        raise ValueError(f"n must be 1 when using greedy sampling, got {n}.")
    names = None if edits is None else tuple(edits)
    return Request(None, Params(given, n, given.get("seed")), lora, names, priority, ops=ops)
