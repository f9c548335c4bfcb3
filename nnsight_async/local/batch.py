"""The prompts of one trace, step by step: padded on the left, each block narrowed to its own rows."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch

from nnsight_async.interleave.locations import LOGITS, SAMPLES
from nnsight_async.local.slab import Padded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nnsight_async.interleave.block import BlockRun
    from nnsight_async.interleave.interleaver import Interleaver
    from nnsight_async.interleave.rows import Span
    from nnsight_async.local.member import Member


class Batch:
    """Runs whose forward passes are one. A sequence that has ended stays in it, unread, until all have."""

    def __init__(self, model: Any, members: Sequence[Member], interleaver: Interleaver, device: torch.device) -> None:
        self.members = members
        self._model = model
        self._interleaver = interleaver
        self._device = device
        self._lengths = [len(member.prompt.ids) for member in members]
        self._padded = len(set(self._lengths)) > 1
        self._cache: Any = None
        # Without weights, masks are made from shapes alone only where there is a cache (transformers 5.19).
        self._caches = device.type == "meta" or any(member.max_tokens > 1 for member in members)
        self._mask: Any = None
        self._step = 0

    @property
    def over(self) -> bool:
        """Whether no run has another step."""
        return all(member.over for member in self.members)

    def step(self) -> None:
        """One forward pass, and a token for each run that goes on."""
        going = [member for member in self.members if not member.over]
        graph = any(member.graph for member in going)
        tokens = [1] * len(self.members) if self._step else self._lengths
        padded = Padded.of(len(self.members), max(tokens), graph=graph)
        spans = self._spans(padded, tokens)
        self._interleaver.differentiable = graph
        with torch.set_grad_enabled(graph):
            self._interleaver.begin_step(spans, padded, stacked=any(len(member.blocks) > 1 for member in going))
            output = self._model(**self._inputs())
            self._cache = getattr(output, "past_key_values", None) if self._caches else None
            drawn = padded.drawn()
            self._interleaver.begin_sampling(self._spans(drawn, [1] * len(self.members)), drawn)
            logits = self._fire(LOGITS, output.logits[:, -1])
            samples = self._fire(SAMPLES, self._draw(logits))
            self._interleaver.end_step()
        self._step += 1
        if graph:
            self._let_go_of_graph()
        self._tell(logits.detach(), samples)

    def _spans(self, padded: Padded, tokens: Sequence[int]) -> dict[BlockRun, Span]:
        return {
            block: padded.span(number, tokens[number])
            for number, member in enumerate(self.members)
            if not member.over
            for block in member.blocks
            if not block.over
        }

    def _inputs(self) -> dict[str, Any]:
        inputs: dict[str, Any] = {"use_cache": self._caches, **self._prompts()} if not self._step else self._next()
        if self._padded:
            inputs["attention_mask"] = self._mask
            if "position_ids" in _parameters(self._model):
                positions = (self._mask.cumsum(-1) - 1).clamp_(min=0)
                inputs["position_ids"] = positions[:, -inputs["input_ids"].shape[1] :]
        return inputs

    def _prompts(self) -> dict[str, Any]:
        longest = max(self._lengths)
        rows = [[0] * (longest - len(member.prompt.ids)) + list(member.prompt.ids) for member in self.members]
        if self._padded:
            kept = [[0] * (longest - length) + [1] * length for length in self._lengths]
            self._mask = torch.tensor(kept, device=self._device)
        inputs = {"input_ids": torch.tensor(rows, device=self._device)}
        for name, value in self.members[0].prompt.beside.items():  # images and the like, of a run that is alone
            inputs[name] = value.to(self._device) if isinstance(value, torch.Tensor) else value
        return inputs

    def _next(self) -> dict[str, Any]:
        ids = torch.tensor([[member.last] for member in self.members], device=self._device)
        if self._padded:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(self.members), 1)], 1)
        return {"input_ids": ids, "past_key_values": self._cache, "use_cache": True}

    def _draw(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.detach()
        with torch.no_grad():
            if len(self.members) == 1:
                return self.members[0].draw(logits)[None]
            return torch.stack([member.draw(logits[n : n + 1]) for n, member in enumerate(self.members)])

    def _fire(self, event: Any, value: torch.Tensor) -> torch.Tensor:
        return self._interleaver.fire(event, value) if event in self._interleaver.waiting else value

    def _tell(self, logits: torch.Tensor, samples: torch.Tensor) -> None:
        drawn: list[int] = [0] * len(self.members) if samples.is_meta else samples[:, 0].tolist()
        for number, member in enumerate(self.members):
            if not member.over:
                member.take(drawn[number], logits[number])
                member.over = member.over or any(block.stopped for block in member.blocks)

    def _let_go_of_graph(self) -> None:
        """Gradients reach back to the beginning of a step, and not into those before it."""
        for layer in getattr(self._cache, "layers", ()):
            for name in ("keys", "values"):
                held = getattr(layer, name, None)
                if isinstance(held, torch.Tensor):
                    setattr(layer, name, held.detach())


def _parameters(model: Any) -> frozenset[str]:
    """The names of what `forward` takes."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT hands all arguments on
    return _parameters_of(type(inner))


@functools.cache
def _parameters_of(kind: Any) -> frozenset[str]:
    return frozenset(inspect.signature(kind.forward).parameters)
