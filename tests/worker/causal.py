"""A small causal model with a key-value cache, built as vLLM builds a Llama, for tests that need no engine."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

WIDTH, HEADS, KV_HEADS, SIZE, VOCABULARY, LAYERS = 128, 4, 2, 32, 512, 4


@dataclass(frozen=True)
class Part:
    """The rows `[start, stop)` of a step are tokens of one request, from position `computed` on."""

    request: str
    start: int
    stop: int
    computed: int


@dataclass
class KeyValues:
    """Keys and values of every request by layer, and the parts of the step that runs."""

    parts: list[Part] = field(default_factory=list)
    held: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def drop(self, request: str) -> None:
        """The request is preempted, or over."""
        self.held = {key: value for key, value in self.held.items() if key[0] != request}

    def extend(self, part: Part, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.held.get((part.request, layer), (k[:0], v[:0]))
        assert len(keys) == part.computed
        both = torch.cat([keys, k]), torch.cat([values, v])
        self.held[part.request, layer] = both
        return both


class Norm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> object:
        stream = x if residual is None else x + residual
        normed = stream * torch.rsqrt(stream.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return normed if residual is None else (normed, stream)


class RotaryEmbedding(torch.nn.Module):
    def forward(self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        turn = 1 + 0.5 * torch.sin(positions.to(q.dtype))[:, None]
        return q * turn, k * turn


class Attention(torch.nn.Module):
    head_size = SIZE

    def __init__(self, cache: KeyValues, layer: int) -> None:
        super().__init__()
        self.cache, self.layer = cache, layer
        self.num_heads, self.num_kv_heads = HEADS, KV_HEADS

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(query)
        for part in self.cache.parts:
            rows = slice(part.start, part.stop)
            keys, values = self.cache.extend(part, self.layer, key[rows], value[rows])
            out[rows] = attend(query[rows], keys, values)
        return out


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The last `len(q)` of `len(k)` tokens look at themselves and what is before them."""
    q, k, v = (rows.view(len(rows), -1, SIZE).transpose(0, 1) for rows in (q, k, v))
    k, v = (heads.repeat_interleave(len(q) // len(heads), 0) for heads in (k, v))
    unseen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(k.shape[1] - q.shape[1] + 1)
    scores = (q @ k.transpose(1, 2) / SIZE**0.5).masked_fill(unseen, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


def linear(inputs: int, outputs: int) -> torch.nn.Linear:
    made = torch.nn.Linear(inputs, outputs, bias=False)
    torch.nn.init.normal_(made.weight, std=inputs**-0.5)
    return made


class SelfAttention(torch.nn.Module):
    def __init__(self, cache: KeyValues, layer: int, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.qkv_proj = linear(WIDTH, (HEADS + 2 * KV_HEADS) * SIZE)
        self.o_proj = linear(HEADS * SIZE, WIDTH)
        self.rotary_emb = rotary
        self.attn = Attention(cache, layer)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv_proj(hidden_states)
        heads, kv_heads = self.attn.num_heads * SIZE, self.attn.num_kv_heads * SIZE
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=-1)
        q, k = self.rotary_emb(positions, q, k)
        attended = self.attn(q, k, v)
        return self.o_proj(attended)


class MLP(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = linear(WIDTH, 2 * WIDTH), linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.silu(self.up(x)))


class Layer(torch.nn.Module):
    def __init__(self, cache: KeyValues, layer: int, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.self_attn = SelfAttention(cache, layer, rotary)
        self.mlp = MLP()
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm()

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions=positions, hidden_states=hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class Decoder(torch.nn.Module):
    def __init__(self, cache: KeyValues) -> None:
        super().__init__()
        rotary = RotaryEmbedding()
        self.embed_tokens = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.layers = torch.nn.ModuleList([Layer(cache, number, rotary) for number in range(LAYERS)])
        self.norm = Norm()

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden, residual = self.embed_tokens(ids), None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        hidden, _ = self.norm(hidden, residual)
        return hidden


class LogitsProcessor(torch.nn.Module):
    def forward(self, lm_head: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return lm_head(hidden)


class Causal(torch.nn.Module):
    """In double precision, so that the make-up of a batch changes no digit that a test looks at."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cache = KeyValues()
        self.model = Decoder(self.cache)
        self.lm_head = linear(WIDTH, VOCABULARY)
        self.lm_head.weight.data *= 4
        self.logits_processor = LogitsProcessor()
        self.double().eval().requires_grad_(requires_grad=False)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.model(ids, positions)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits_processor(self.lm_head, hidden)
