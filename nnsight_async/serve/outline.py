"""Where the layers of a model are, and what a logit lens is made of."""

from __future__ import annotations

from nnsight_async.tree.manifest import Manifest, ModuleInfo

NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm")


def outline(manifest: Manifest) -> dict[str, str | int]:
    """Paths: `layers` (a list), `norm` (after the last layer), `head`, `processor`; empty where they are not known."""
    layers = max((info for info in manifest.modules.values() if info.is_list), key=_size, default=None)
    if layers is None:
        return {"layers": "", "count": 0, "norm": "", "head": "", "processor": ""}
    trunk = layers.path.rpartition(".")[0]
    norm = next((f"{trunk}.{name}" for name in NORMS if f"{trunk}.{name}" in manifest.modules), "")
    return {
        "layers": layers.path,
        "count": len(layers.children),
        "norm": norm,
        "head": next((path for path in ("lm_head", f"{trunk}.embed_tokens") if path in manifest.modules), ""),
        "processor": "logits_processor" if "logits_processor" in manifest.modules else "",
    }


def _size(info: ModuleInfo) -> int:
    return len(info.children)
