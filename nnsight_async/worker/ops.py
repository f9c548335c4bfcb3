"""The declared operations of the requests that this worker serves, from arrival to end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nnsight_async.errors import NotASiteError, OpLimitError, ShapeError
from nnsight_async.interleave.locations import expression
from nnsight_async.runs.ops import largest
from nnsight_async.worker.composition import numbers
from nnsight_async.worker.op_positions import groups
from nnsight_async.worker.op_tables import KINDS, NOTHING, Mirror, Room, Tables

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from vllm.v1.core.sched.output import NewRequestData

    from nnsight_async.runs.ops import Op, ShippedOps, Vector
    from nnsight_async.worker.composition import Composition

Step = tuple[int, int, bytes, float, float]
"""An operation of a state: its site, its kind, what tells its vector from others, and its two numbers."""

NONE: NDArray[np.int64] = np.zeros((2, 0), dtype=np.int64)

TAME = 1e12
"""Up to here, numbers and vectors keep a stream of ordinary values finite, squares included, in float32."""


class Limits(NamedTuple):
    """How many positions the model knows, and whether its streams are of a type with a narrow range (float16)."""

    positions: int = 1
    narrow: bool = False


@dataclass(slots=True)
class Applied:
    """The operations of one request."""

    states: NDArray[np.int32]
    """By position; the last holds for all after it."""
    settled: int
    """From this position on it is the last state."""
    final: int
    chains: list[tuple[Step, ...]]
    paths: tuple[str, ...]
    ops: Sequence[Op]
    prompt: int
    total: int

    def at(self, position: int, rows: int) -> NDArray[np.int32]:
        """The states of so many rows, the first of which is at a position."""
        last = len(self.states) - 1
        return self.states[np.minimum(np.arange(position, position + rows), last)]


@dataclass(slots=True)
class Shared:
    """A state or a vector, which several requests may use."""

    number: int
    users: int = 0
    nodes: Sequence[int] = ()
    largest: float = 0.0
    """Of a vector, the largest absolute value."""


class Ops:
    """Operations by vLLM request id. A step that is like the one before it costs a comparison of who is in it."""

    def __init__(
        self,
        sites: Mapping[str, int] | None = None,
        tables: Callable[[], Tables] | None = None,
        limits: Limits | None = None,
        enter: Callable[[str, bool], object] | None = None,
    ) -> None:
        """`sites`: the layers where operations can act, those of other stages too, with their numbers.

        So all ranks find the same wrong with a request.

        `tables` makes the tables, when they are needed first; `enter` has a layer report while it is to be changed.
        """
        self._sites = sites or {}
        self._make = tables
        self._limits = limits or Limits()
        self._enter = enter
        self._known: set[str] = set()
        """Requests that have been taken in, though they may have no operations any more."""
        self._live: dict[str, Applied] = {}
        self._states: dict[tuple[Step, ...], Shared] = {}
        self._vectors: dict[bytes, Shared] = {}
        self._entered: Counter[str] = Counter()
        self._mirror: Mirror | None = None
        self._room: dict[str, Room] = {}
        self._seen: tuple[list[str], list[int]] = [], []
        self._unsettled: NDArray[np.int64] = NONE
        """Which of the requests seen have other operations before some position, and that position."""
        self.wild: list[int] = []
        """Which of the step's requests have operations that might make its stream infinite."""
        self.wild_requests: set[str] = set()
        """Those of all requests that have or had such operations: what these made of the stream stays in the cache."""
        self.total = 0
        """Requests that had operations, so far."""

    @property
    def idle(self) -> bool:
        """Whether no request here has operations, or has had any that might have made its stream infinite."""
        return not (self._live or self.wild_requests)

    def __contains__(self, request: str) -> bool:
        return request in self._known

    def arrive(
        self, request: NewRequestData, shipped: ShippedOps, prompt: int, edits: Collection[int] = ()
    ) -> Exception | None:
        """Take a request in; returns what is wrong with its operations.

        Those of an edit that is none of `edits`, because it was cleared on the way, are left out.
        """
        most, params = self._limits.positions, request.sampling_params
        tokens = None if params is None else params.max_tokens
        total = most if tokens is None else min(prompt + max(tokens - 1, 0), most)
        self.total += 1
        self._known.add(request.req_id)
        try:
            ops = [op for op in shipped.each() if not op.edit or op.edit in edits]
            if ops:
                self._take(request.req_id, ops, prompt, max(total, prompt, 1))
        except Exception as error:
            return error
        return None

    def clear(self, edits: Collection[int]) -> list[tuple[str, Exception]]:
        """Edits end, in the requests that go on too; returns those that there is no room for without them, and why."""
        left: list[tuple[str, Applied, list[Op]]] = []
        for request, applied in self._live.items():
            ops = [op for op in applied.ops if op.edit not in edits]
            if len(ops) < len(applied.ops):
                left.append((request, applied, ops))
        for request, _, _ in left:
            self._let_go(request)
            self._seen = [], []
        failed: list[tuple[str, Exception]] = []
        for request, applied, ops in left:
            try:
                if ops:
                    self._take(request, ops, applied.prompt, applied.total)
            except OpLimitError as error:  # others do what it did, and keep that
                failed.append((request, error))
        return failed

    def part(self, finished: Iterable[str]) -> None:
        """Requests are over: let go of what they used."""
        for request in self._known.intersection(finished) if self._known else ():
            self._known.discard(request)
            self.wild_requests.discard(request)
            self._let_go(request)

    def _let_go(self, request: str) -> None:
        applied = self._live.pop(request, None)
        if applied is not None:
            self._release(applied.chains)
            self._leave(applied.paths)

    def begin_step(self, step: Composition) -> None:
        """The forward pass over `step` is about to run."""
        mirror = self._mirror
        if mirror is None or (self.idle and not mirror.marked):
            self.wild = []
            return
        mirror.upload()
        requests = list(step.requests)
        starts = list(numbers(step.starts, len(requests) + 1))
        if (requests, starts) == self._seen and self._settled(step):
            return
        wild, live = self.wild_requests, self._live
        self.wild = [at for at, request in enumerate(requests) if request in wild] if wild else []
        finals: list[int] = []
        unsettled: list[tuple[int, int]] = []
        for at, request in enumerate(requests):
            applied = live.get(request)
            finals.append(NOTHING if applied is None else applied.final)
            if applied is not None and applied.settled:
                unsettled.append((at, applied.settled))
        states = np.repeat(np.array(finals, dtype=np.int32), np.diff(np.array(starts, dtype=np.int64)))
        self._seen, self._unsettled = (requests, starts), np.array(unsettled).T if unsettled else NONE
        if not self._settled(step):
            for at, settled in unsettled:
                position = int(step.computed[at])
                if position < settled:
                    rows = slice(starts[at], starts[at + 1])
                    states[rows] = live[requests[at]].at(position, rows.stop - rows.start)
            self._seen = [], []
        mirror.mark(states)

    def _settled(self, step: Composition) -> bool:
        """Whether all requests of a step, of those seen last, are where their operations stay as they are."""
        at, settled = self._unsettled
        return not len(at) or bool((np.asarray(step.computed)[at] >= settled).all())

    def _take(self, request: str, ops: Sequence[Op], prompt: int, total: int) -> None:
        """Find room for what a request does, or let go of what was found and raise."""
        for op in ops:
            if op.path not in self._sites:
                raise NotASiteError(f"{expression(op.path)} is not a layer where declared operations act (op_sites=)")
        vectors = {op.vector.digest: op.vector for op in ops}
        for vector in vectors.values():
            self._check_width(vector)
        steps = [self._step(op) for op in ops]
        wheres = [op.positions for op in ops]
        sets, which = groups(wheres, prompt, total)
        chains = [tuple(steps[number] for number in chosen) for chosen in sets]
        self._check_share({"states": len(chains), "nodes": sum(map(len, chains)), "vectors": len(vectors)})
        taken: list[tuple[Step, ...]] = []
        try:
            found: list[int] = []
            for chain in chains:
                found.append(self._state(chain, vectors) if chain else NOTHING)
                taken += [chain] if chain else []
        except BaseException:
            self._release(taken)
            raise
        states, settled = np.array(found, dtype=np.int32), 0
        if len(found) > 1:
            states = states[which]
            changes = np.flatnonzero(np.diff(states))
            settled = int(changes[-1]) + 1 if len(changes) else 0
        paths = dict.fromkeys(op.path for op in ops)
        if self._limits.narrow or any(self._is_wild(step) for chain in taken for step in chain):
            self.wild_requests.add(request)
        self._live[request] = Applied(
            states[: settled + 1], settled, int(states[-1]), taken, tuple(paths), ops, prompt, total
        )
        for path in paths:
            self._entered[path] += 1
            if self._entered[path] == 1 and self._enter is not None:
                self._enter(path, True)

    def _leave(self, paths: Iterable[str]) -> None:
        for path in paths:
            self._entered[path] -= 1
            if not self._entered[path] and self._enter is not None:
                self._enter(path, False)

    def _step(self, op: Op) -> Step:
        return self._sites[op.path], KINDS.index(op.kind), op.vector.digest, op.low, op.high

    def _state(self, chain: tuple[Step, ...], vectors: Mapping[bytes, Vector]) -> int:
        """The number of the state in which all that is done."""
        found = self._states.get(chain)
        if found is None:
            found = self._states[chain] = self._made(chain, vectors)
        found.users += 1
        return found.number

    def _made(self, chain: tuple[Step, ...], vectors: Mapping[bytes, Vector]) -> Shared:
        mirror, room = self._ready(), self._room
        new = {digest for _, _, digest, _, _ in chain} - self._vectors.keys()
        for what, wanted in (("states", 1), ("nodes", len(chain)), ("vectors", len(new))):
            if len(room[what]) < wanted:
                raise OpLimitError(
                    f"the requests of this engine use {room[what].size} {SAID[what]} of declared operations, which is "
                    "all that it has room for: send fewer at a time, or raise max_num_seqs"
                )
        for digest in sorted(new):
            vector = vectors[digest].tensor()
            shared = self._vectors[digest] = Shared(room["vectors"].take(), largest=largest(vector))
            mirror.vector(shared.number, vector)
        made = Shared(room["states"].take(), nodes=[room["nodes"].take() for _ in chain])
        heads: dict[int, int] = {}
        for (site, kind, digest, low, high), node in zip(reversed(chain), made.nodes, strict=True):
            shared = self._vectors[digest]
            shared.users += 1
            mirror.node(node, kind, shared.number, heads.get(site, NOTHING), low, high)
            heads[site] = node
        mirror.state(made.number, heads)
        return made

    def _check_share(self, wanted: Mapping[str, int]) -> None:
        """One request may take half of the room."""
        for what, count in wanted.items():
            most = max(self._room[what].size // 2, 1)
            if count > most:
                raise OpLimitError(
                    f"the declared operations of this request take {count} {SAID[what]}; one request may have {most}"
                )

    def _release(self, chains: Iterable[tuple[Step, ...]]) -> None:
        for chain in chains:
            state = self._states[chain]
            state.users -= 1
            if state.users:
                continue
            del self._states[chain]
            self._room["states"].give(state.number)
            for node in state.nodes:
                self._room["nodes"].give(node)
            for _, _, digest, _, _ in chain:
                vector = self._vectors[digest]
                vector.users -= 1
                if not vector.users:
                    del self._vectors[digest]
                    self._room["vectors"].give(vector.number)

    def _is_wild(self, step: Step) -> bool:
        """Whether it may make values of an ordinary stream very large."""
        _, kind, digest, low, high = step
        if KINDS[kind] == "ablate":
            return not 0 <= low <= 2
        most = self._vectors[digest].largest
        if KINDS[kind] == "steer":
            return not abs(low) * most <= TAME
        return not max([most, *(abs(bound) for bound in (low, high) if np.isfinite(bound))]) <= TAME

    def _ready(self) -> Mirror:
        if self._mirror is None:
            assert self._make is not None
            tables = self._make()
            self._mirror = Mirror(tables)
            sizes = tables.sizes
            self._room = {"states": Room(sizes.states), "nodes": Room(sizes.nodes), "vectors": Room(sizes.vectors)}
        return self._mirror

    def _check_width(self, vector: Vector) -> None:
        width = self._ready().width
        if vector.width != width:
            raise ShapeError(f"a vector of {vector.width} was given, and the residual stream has a width of {width}")


SAID = {"states": "combinations", "nodes": "steps", "vectors": "vectors"}
