"""The module tree of a model as data: what a client knows about a model that it does not hold."""

from __future__ import annotations

from collections import Counter
from keyword import iskeyword
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

TAKEN = frozenset({
    # by every module
    "heads", "input", "inputs", "output", "resid_mid", "resid_post", "resid_pre", "save", "skip", "source",
    # by every model
    "ablate", "aclose", "add_lora", "ainstall", "alaunch", "backward", "barrier", "capture", "clamp", "clear_edits",
    "close", "dispatch", "dispatched", "edit", "edits", "generate", "install", "launch", "list_loras", "logits",
    "map", "mode", "module", "op_sites", "owners", "reading", "remove_lora", "replace", "repo", "run", "samples",
    "scan", "session", "stats", "steer", "taps", "tokenizer", "trace", "tree", "uninstall", "vllm_entrypoint",
})  # fmt: skip
"""Names that a module cannot be given, because they stand for something else there."""

FORMAT = 3  # part of every cache key: raise it when a field changes


class ParameterInfo(msgspec.Struct, frozen=True):
    """A parameter of one module.

    `shape` is this rank's shard and `full_shape` the whole tensor; they differ along `shard_dim` alone, which is None
    where the parameter is not split. `dtype` is torch's name without the prefix: `"bfloat16"`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    full_shape: tuple[int, ...]
    shard_dim: int | None = None

    @property
    def sharded(self) -> bool:
        """Whether this rank holds a part of the tensor only."""
        return self.full_shape != self.shape


class OperationInfo(msgspec.Struct, frozen=True):
    """A call in the body of a function: its name, the line of its file, and what is written before the parenthesis.

    `inside` is the key of the function that is called, where that is listed too; `reason` says why a callee has no
    operations. Neither is given where what is called is known only when it runs.
    """

    name: str
    line: int
    callee: str
    inside: str | None = None
    reason: str | None = None


class SourceInfo(msgspec.Struct, frozen=True):
    """A function that some module has as its forward, or that is called in one: where it is, its text and its calls."""

    name: str
    first_line: int
    text: str
    operations: tuple[OperationInfo, ...] = ()


class ModuleInfo(msgspec.Struct, frozen=True):
    """A module of the tree.

    `entries` and `exits` are the places of the module's calls in the order of one forward pass: one counter goes up at
    every entry and every exit of any module. They are empty if the module was not called, or nothing was recorded.
    A module object with several paths has the calls of all of them under the first, and under each of the `aliases`
    (whose `alias_of` is the first path) the calls made by the parent in that path.
    """

    path: str
    cls: str
    qualified: str
    bases: tuple[str, ...] = ()
    children: tuple[str, ...] = ()
    parameters: tuple[ParameterInfo, ...] = ()
    is_list: bool = False
    extra: str = ""
    reachable: bool = True
    reason: str | None = None
    entries: tuple[int, ...] = ()
    exits: tuple[int, ...] = ()
    alias_of: str | None = None
    aliases: tuple[str, ...] = ()
    torch_hooks: bool = True
    """Whether the class goes through `torch.nn.Module.__call__`, so that forward hooks fire."""
    source: str | None = None
    """The key of the module's forward among the `sources` of the manifest."""
    sourceless: str = ""
    """Why there is none."""
    stage: int = 0
    """The pipeline stage that has the module; of those around the layers, which all stages have, the first."""

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]


class Manifest(msgspec.Struct, frozen=True):
    """The tree of one model: `modules` by path in the order of `named_modules`, the root under `""`.

    `recorded` says whether `entries` and `exits` are known, and with them which modules a forward pass calls. `sources`
    has every function once, however many modules have it as their forward.
    """

    repo: str
    vllm_version: str
    modules: dict[str, ModuleInfo]
    recorded: bool = False
    renames: dict[str, str] = {}
    sources: dict[str, SourceInfo] = {}

    def renamed(self, renames: Mapping[str, str]) -> Manifest:
        """With other names for modules: `{"model.layers": "layers"}` for one path, `{"self_attn": "attn"}` for every
        module of that name. Raises `ValueError` for a path that does not exist, and for a name that is none, is given
        twice, or hides something that a model or a module has."""
        names = {info.name for info in self.modules.values()}
        parameters = {part.name for info in self.modules.values() for part in info.parameters}
        given = Counter(renames.values())
        for path, alias in renames.items():
            if path not in (self.modules if "." in path else names):
                raise ValueError(f"rename: the model has no module {path!r}")
            taken = self.root.children if "." in path else names
            if not alias.isidentifier() or iskeyword(alias) or alias.startswith("_"):
                raise ValueError(f"rename: {alias!r} is not a name that can be written as `model.{alias}`")
            if alias in taken:
                raise ValueError(f"rename: {alias!r} is the name of a module already")
            if alias in TAKEN or alias in parameters:
                raise ValueError(f"rename: {alias!r} would hide what models or modules have under that name")
            if given[alias] > 1:
                raise ValueError(f"rename: {alias!r} is given to several modules")
        return msgspec.structs.replace(self, renames={alias: path for path, alias in renames.items()})

    @property
    def root(self) -> ModuleInfo:
        """The model itself."""
        return self.modules[""]

    def encode(self) -> bytes:
        """The manifest as MessagePack."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """The manifest that `encode` wrote; raises `msgspec.DecodeError` for anything else."""
        return _decoder.decode(data)


_decoder = msgspec.msgpack.Decoder(Manifest)


def join(path: str, name: str) -> str:
    """The path of the child `name` of the module at `path`."""
    return f"{path}.{name}" if path else name
