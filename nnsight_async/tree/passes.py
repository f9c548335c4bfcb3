"""What a manifest says of forward passes, for those who run blocks in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nnsight_async.interleave.order import Order

if TYPE_CHECKING:
    from nnsight_async.tree.manifest import Manifest


def order_of(manifest: Manifest) -> Order:
    """The order in which a pass goes by the modules."""
    modules = manifest.modules
    return Order(
        {path: info.entries for path, info in modules.items()}, {path: info.exits for path, info in modules.items()}
    )


def aliases_of(manifest: Manifest) -> dict[str, str]:
    """By the further paths of modules their first."""
    return {path: info.alias_of for path, info in manifest.modules.items() if info.alias_of is not None}
