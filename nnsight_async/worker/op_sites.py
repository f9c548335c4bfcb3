"""The layers of the running model where declared operations act."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

import torch

from nnsight_async.errors import ShapeError, UnsupportedError
from nnsight_async.interleave.views import pair
from nnsight_async.runs.ops import KEY
from nnsight_async.tree.describe import describe
from nnsight_async.tree.layers import declared, layers
from nnsight_async.worker.op_kernel import change
from nnsight_async.worker.op_tables import Sizes, Tables
from nnsight_async.worker.ops import Limits, Ops
from nnsight_async.worker.stages import here

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nnsight_async.interleave.interleaver import Interleaver
    from nnsight_async.tree.manifest import Manifest
    from nnsight_async.tree.record import Observe

HEADS = "nnsight_heads"
"""The buffer of a layer in which an operation of a graph finds its site: one graph then serves all layers."""


class Site:
    """A layer whose output may have to be changed."""

    def __init__(self, sites: OpSites, number: int) -> None:
        self.reported = False
        self._sites = sites
        self._number = number

    def __call__(self, output: Any) -> None:
        self._change(*pair(output))

    def arrive(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """A hooked layer has returned. It may have called this for it already, or a block may apply the layer."""
        if not self.reported and not self._sites.applying:
            self._change(hidden, residual)

    def _change(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        tables = self._sites.tables
        if tables is not None:
            change(tables, tables.heads[self._number], hidden, residual)


class OpSites:
    """Sites by path, and the tables of them all."""

    def __init__(self, paths: Sequence[str], sizes: Sizes, device: torch.device) -> None:
        self.numbers = {path: number for number, path in enumerate(paths)}
        self.changes = {path: Site(self, number) for path, number in self.numbers.items()}
        self.tables: Tables | None = None
        self.hooked = False
        """Whether layers change their output themselves, in graphs too."""
        self.interleaver: Interleaver | None = None
        self._sizes = sizes
        self._device = device

    @property
    def applying(self) -> bool:
        """Whether a block has its turn, and what is called is called by it."""
        return self.interleaver is not None and self.interleaver.running

    def made(self) -> Tables:
        """The tables, which are made when somebody needs them."""
        if self.tables is None:
            with torch.inference_mode(False):  # requests arrive outside of that mode
                self.tables = Tables(self._sizes, self._device)
        return self.tables

    def hook(self, model: torch.nn.Module) -> None:
        """Have the layers change their output themselves, so that what is compiled and recorded of them does too."""
        tables = self.made()
        for path, number in self.numbers.items():
            layer = model.get_submodule(path)
            if type(layer).__call__ is not torch.nn.Module.__call__:
                raise UnsupportedError(
                    f"op_sites: {type(layer).__name__} is compiled as a whole: set enforce_eager=True"
                )
            layer.register_buffer(HEADS, tables.heads[number], persistent=False)
            layer.register_forward_hook(_changed)
            _by_address[tables.heads[number].data_ptr()] = self.changes[path]
        self.hooked = True


_by_address: weakref.WeakValueDictionary[int, Site] = weakref.WeakValueDictionary()
"""By the memory of their heads, which is all that a graph knows of a site."""


def _changed(layer: torch.nn.Module, args: object, output: Any) -> None:
    hidden, residual = pair(output)
    if residual is None:
        torch.ops.nnsight_async.change(hidden, getattr(layer, HEADS))
    else:
        torch.ops.nnsight_async.change_pair(hidden, residual, getattr(layer, HEADS))


def _change(hidden: torch.Tensor, heads: torch.Tensor) -> None:
    _change_pair(hidden, None, heads)


def _change_pair(hidden: torch.Tensor, residual: torch.Tensor | None, heads: torch.Tensor) -> None:
    site = _by_address.get(heads.data_ptr())
    if site is not None:
        site.arrive(hidden, residual)


def _nothing(*tensors: torch.Tensor) -> None:
    pass


_library = torch.library.Library("nnsight_async", "FRAGMENT")
for _name, _arguments, _implementation in (
    ("change", "Tensor(a!) hidden, Tensor heads", _change),
    ("change_pair", "Tensor(a!) hidden, Tensor(b!) residual, Tensor heads", _change_pair),
):
    _library.define(f"{_name}({_arguments}) -> ()")
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"nnsight_async::{_name}", _nothing, lib=_library)


class Streams:
    """Is shown a forward pass, and notes how wide what each item of a list returns is, if it is a stream."""

    def __init__(self, observe: Observe | None) -> None:
        self._widths: dict[str, int] = {}
        self._observe = observe

    def __call__(self, path: str, kind: Literal["inputs", "output"], value: Any, /) -> None:
        if kind == "output" and path.rpartition(".")[2].isdecimal():
            with suppress(ShapeError):
                self._widths[path] = int(pair(value)[0].shape[-1])
        if self._observe is not None:
            self._observe(path, kind, value)

    def of_one_width(self, paths: Iterable[str]) -> tuple[list[str], int]:
        """Those of `paths` between which what passes has the width that most of it has, and that width."""
        found = {path: self._widths[path] for path in paths if path in self._widths}
        widths = list(found.values())
        width = max(set(widths), key=widths.count, default=1)
        return [path for path in found if found[path] == width], width


def asked(config: Any) -> Mapping[str, Any] | None:
    """What `VLLM(op_sites=)` has put into vLLM's configuration."""
    additional = config.additional_config
    return additional.get(KEY) if isinstance(additional, dict) else None


def sizes(runner: Any, sites: int, width: int) -> Sizes:
    """Of tables for this runner."""
    config = runner.vllm_config
    scheduler = config.scheduler_config
    graphs = getattr(config.compilation_config, "max_cudagraph_capture_size", None) or 0
    rows = max(scheduler.max_num_batched_tokens, graphs)
    return Sizes.of(rows, scheduler.max_num_seqs, sites, width)


def hooked(runner: Any) -> OpSites | None:
    """The sites that were asked for on an engine that replays graphs, hooked; before anything of it is compiled."""
    config = runner.vllm_config
    wanted = asked(config)
    if wanted is None or config.model_config.enforce_eager:
        return None
    passes = getattr(config.compilation_config, "pass_config", None)
    if getattr(passes, "enable_sp", False):
        raise UnsupportedError("op_sites= with sequence parallelism: ranks have other rows than they are told of")
    manifest = describe(runner.model).renamed(wanted["renames"])
    paths = declared(wanted["op_sites"], manifest)
    sites = OpSites(paths, sizes(runner, len(paths), config.model_config.get_hidden_size()), runner.device)
    sites.hook(runner.model)
    return sites


def ops_of(runner: Any, interleaver: Interleaver, manifest: Manifest, streams: Streams, sites: OpSites | None) -> Ops:
    """The operations of a worker that has booted; `sites` are those that have been hooked."""
    config, there = runner.vllm_config, here(runner.model)
    fit, width = streams.of_one_width(layers(manifest))
    paths: Sequence[str] = [path for path in layers(manifest) if path in fit or path not in there]
    if not config.model_config.enforce_eager and sites is None:
        paths = []
    elif (wanted := asked(config)) is not None:
        chosen = declared(wanted["op_sites"], manifest.renamed(wanted["renames"]))
        paths = [path for path in paths if path in chosen]
    sites = sites or OpSites(paths, sizes(runner, len(paths), width), runner.device)
    sites.interleaver = interleaver
    interleaver.sites.changes = sites.changes
    limits = Limits(runner.model_config.max_model_len, runner.model_config.dtype == torch.float16)

    def enter(path: str, on: bool) -> None:
        if path in there:
            (interleaver.sites.hold if on else interleaver.sites.let_go)(path)

    return Ops(sites.numbers, sites.made, limits, None if sites.hooked else enter)
