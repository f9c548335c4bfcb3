"""Models of transformers: from a repository, from a config alone, or as they were given."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nnsight_async.local.arguments import FORMING, shared
from nnsight_async.tree.describe import describe
from nnsight_async.tree.record import record

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nnsight_async.tree.manifest import Manifest


@dataclass(slots=True)
class Loaded:
    """A model, and what belongs to it. On the device "meta" it has no weights."""

    name: str
    model: torch.nn.Module
    tokenizer: Any
    device: torch.device
    partial: bool
    """Whether some of its modules are not called for text alone."""

    @property
    def ends(self) -> frozenset[int]:
        """The ids that end a generation."""
        found: Any = getattr(self.generation_config, "eos_token_id", None)
        if found is None:
            return frozenset()
        return frozenset([found] if isinstance(found, int) else found)

    @property
    def generation_config(self) -> Any:
        return getattr(self.model, "generation_config", None)

    @property
    def vocabulary(self) -> int:
        return _of_text(self.model).vocab_size

    @property
    def positions(self) -> int:
        return getattr(_of_text(self.model), "max_position_embeddings", 1 << 31)

    def manifest(self) -> Manifest:
        """The tree, with the order of a forward pass over one token."""
        ids = torch.zeros(1, 1, dtype=torch.int64, device=self.device)

        def forward() -> None:
            with torch.no_grad():
                self.model(input_ids=ids, use_cache=True)

        try:
            calls = record(self.model, forward)
        except RuntimeError:
            if self.device.type != "meta":
                raise
            calls = None  # its forward pass looks at values, which are not there
        return describe(self.model, repo=self.name, calls=calls, whole=not self.partial)


def load(repo: str, arguments: Mapping[str, Any], device: Any = None) -> Loaded:
    """The model of a repository or folder, in evaluation mode, its weights frozen."""
    kind, _ = _kind(repo, arguments)
    model: Any = kind.from_pretrained(repo, **arguments)
    if device is not None:
        model = model.to(device)
    _know_padding(model)
    return given(model, repo, _tokenizer(repo, arguments))


def given(model: Any, name: str, tokenizer: Any) -> Loaded:
    """A model that somebody has loaded."""
    model.eval().requires_grad_(False)
    device: torch.device = model.get_input_embeddings().weight.device
    return Loaded(name, model, tokenizer, device, _is_partial(model.config))


def skeleton(repo: str, arguments: Mapping[str, Any]) -> Loaded:
    """The model without its weights, made from the config alone."""
    kind, config = _kind(repo, arguments)
    formed = {name: arguments[name] for name in FORMING if arguments.get(name) not in (None, "auto")}
    return hollow(kind, config, repo, _tokenizer(repo, arguments), **formed)


def hollow(kind: Any, config: Any, name: str, tokenizer: Any = None, **arguments: Any) -> Loaded:
    """A model of `config` without weights; `kind` is its class, or one that finds it; `arguments` are of `FORMING`."""
    from transformers.initialization import no_init_weights

    make = getattr(kind, "from_config", None) or kind._from_config
    with torch.device("meta"), no_init_weights():
        model = make(copy.deepcopy(config), **arguments)  # which it changes
    _know_padding(model)
    # PyTorch's grouped product of matrices has no shapes to tell but those of bfloat16 (torch 2.13).
    model.set_experts_implementation("batched_mm")
    model.eval().requires_grad_(False)
    return Loaded(name, model, tokenizer, torch.device("meta"), _is_partial(config))


def _kind(repo: str, arguments: Mapping[str, Any]) -> tuple[Any, Any]:
    """The class to load with, and the config."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config: Any = arguments.get("config") or AutoConfig.from_pretrained(repo, **shared(arguments))
    return (AutoModelForImageTextToText if _is_partial(config) else AutoModelForCausalLM), config


def _know_padding(model: Any) -> None:
    """Have the model not look for padding in ids that come without a mask (transformers 5.19): they hold none."""
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            vars(module)["warn_if_padding_and_no_attention_mask"] = _nothing


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def _is_partial(config: Any) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def _tokenizer(repo: str, arguments: Mapping[str, Any]) -> Any:
    """The tokenizer, or None where the repository has none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(repo, **shared(arguments))
    except (OSError, ValueError, KeyError):
        return None


def _of_text(model: Any) -> Any:
    return model.config.get_text_config()
