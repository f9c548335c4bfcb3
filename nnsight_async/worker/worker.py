"""What our worker adds to vLLM's: blocks on requests, and the manifest of its model."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import msgspec
import vllm
from vllm.lora.request import LoRARequest

from nnsight_async.interleave.console import keep_warnings
from nnsight_async.interleave.interleaver import Limits
from nnsight_async.interleave.locations import Location
from nnsight_async.interleave.taps import Taps
from nnsight_async.runs import failures
from nnsight_async.runs.frames import inbox_address
from nnsight_async.tree.describe import describe
from nnsight_async.tree.envoy import Envoy
from nnsight_async.tree.model import ModelView
from nnsight_async.tree.passes import aliases_of, order_of
from nnsight_async.tree.record import record
from nnsight_async.worker.adapters import Adapters
from nnsight_async.worker.blocks import Blocks, Edit
from nnsight_async.worker.entries import around
from nnsight_async.worker.following import FollowingBlocks
from nnsight_async.worker.graphs import Graphs
from nnsight_async.worker.last_words import HOME, spoken
from nnsight_async.worker.op_sites import OpSites, Streams, hooked, ops_of
from nnsight_async.worker.outbox import NoOutbox, Outbox
from nnsight_async.worker.recycling import Recycling
from nnsight_async.worker.refuse import refuse
from nnsight_async.worker.stages import PipelineParallel, StagedBlocks, Unheard
from nnsight_async.worker.tensor_parallel import TensorParallel
from nnsight_async.worker.v1 import V1Entry
from nnsight_async.worker.v2 import V2Entry

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from nnsight_async.interleave.locations import Kind
    from nnsight_async.tree.manifest import Manifest

FATAL = (
    "init_device",
    "load_model",
    "get_kv_cache_spec",
    "determine_available_memory",
    "initialize_from_config",
    "compile_or_warm_up_model",
    "execute_model",
    "sample_tokens",
)
"""What an engine ends of when it raises. A worker in a process of its own passes on no class (vLLM 0.32, 0.33)."""


class BlockWorker:
    """Mixed into a worker class of vLLM, in front of it (`Worker` of gpu_worker, `CPUWorker`; vLLM 0.32, 0.33)."""

    nnsight_blocks: Blocks
    nnsight_outbox: Outbox
    nnsight_manifest: Manifest
    nnsight_graphs: Graphs | None
    nnsight_agree: Callable[[str | None], Sequence[str | None]]
    nnsight_runner: str
    nnsight_adapters: Adapters
    nnsight_op_sites: OpSites | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in FATAL:
            around(cls, name, spoken)

    def init_device(self) -> None:
        refuse(self.vllm_config)  # type: ignore[attr-defined]
        super().init_device()  # type: ignore[misc]

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        self.nnsight_op_sites = hooked(self.model_runner)  # type: ignore[attr-defined]

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()  # type: ignore[misc]
        self._nnsight_boot()
        return times

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        if hasattr(self, "nnsight_blocks"):  # vLLM 0.33 warms its kernels up with requests, before there are any
            self.nnsight_blocks.schedule(scheduler_output)
        return super().execute_model(scheduler_output)  # type: ignore[misc]

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        if hasattr(self, "nnsight_blocks"):
            self.nnsight_blocks.end_step()
        return output

    def nnsight_describe(self) -> bytes:
        """The manifest of this rank's model, encoded."""
        return self.nnsight_manifest.encode()

    def nnsight_rename(self, renames: dict[str, str]) -> None:
        """Let blocks use other names for modules; the client has checked them against the manifest."""
        self.nnsight_blocks.interleaver.model = ModelView(Envoy(self.nnsight_manifest.renamed(renames)))

    def nnsight_tap(self, taps: list[tuple[str, Kind, str]]) -> bytes | None:
        """Have blocks look at these locations alone, where graphs are to stop; returns the error, packed."""
        interleaver = self.nnsight_blocks.interleaver
        events = [Location(*tap) for tap in taps]

        def declare() -> None:
            for event in events:
                interleaver.check(event)
            interleaver.taps = Taps(events, interleaver.order)

        def record() -> None:
            if self.nnsight_graphs is not None:
                self.nnsight_graphs.record(events)

        return self._nnsight_together(declare) or self._nnsight_together(record)

    def _nnsight_together(self, work: Callable[[], None]) -> bytes | None:
        """Do something on all ranks; returns the error of one that could not, packed."""
        error: Exception | None = None
        try:
            work()
        except Exception as raised:
            error = raised
        told = [each for each in self.nnsight_agree(None if error is None else str(error)) if each is not None]
        if told:
            return failures.pack(error or RuntimeError(told[0]), "while the engine was made to stop at the taps")
        return None

    def nnsight_receive(self, digest: bytes, size: int, start: int, piece: bytes) -> str | None:
        """Take in a piece of a constant; returns what went wrong (vLLM would log it as a fault of the engine)."""
        try:
            self.nnsight_blocks.receive(digest, size, start, piece)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def nnsight_drop(self, digests: list[bytes]) -> None:
        """Let go of constants; blocks that run have their own."""
        self.nnsight_blocks.constants.drop(digests)

    def nnsight_install(self, number: int, payload: bytes, rowwise: bool, timeout: float) -> bytes | None:
        """Have an edit; returns the error of its block that cannot be loaded, packed."""
        try:
            self.nnsight_blocks.install(number, Edit(payload, rowwise), timeout)
        except BaseException as error:
            return failures.pack(error, "while the edit was loaded in the worker")
        return None

    def nnsight_clear(self, numbers: list[int]) -> None:
        """End edits; when this returns, no request runs them any more."""
        self.nnsight_blocks.clear(numbers)

    def nnsight_load_adapter(self, lora: Any) -> bytes | None:
        """Load a LoRA adapter, given as plain data; returns the error, packed."""
        try:
            self.nnsight_adapters.load(msgspec.convert(lora, LoRARequest))
        except Exception as error:
            return failures.pack(error, "while it was loaded ahead of requests")
        return None

    def nnsight_mark(self, address: str, number: int) -> list[tuple[int, int, int]] | None:
        """Send a mark behind all that was reported; returns how much that was, by key and part, of the runs that go.

        None where nothing is reported.
        """
        if isinstance(self.nnsight_outbox, NoOutbox):
            return None
        self.nnsight_outbox.mark(address, number)
        return [(run.key, run.part, run.reports) for run in self.nnsight_blocks.stand_alone()]

    def nnsight_counts(self) -> dict[str, Any]:
        """What blocks hold in this worker now, and what they have taken so far."""
        interleaver = self.nnsight_blocks.interleaver
        return {
            "runner": self.nnsight_runner,
            "runs": len(self.nnsight_blocks.runs),
            "edits": self.nnsight_blocks.edits,
            "waiting": len(interleaver.waiting),
            "entered": interleaver.sites.entered,
            "watched": interleaver.sites.inside.watched,
            "reports": interleaver.sites.reports,
            "steps": self.nnsight_blocks.steps,
            "planned": self.nnsight_blocks.planned,
            "ops": self.nnsight_blocks.ops.total,
            "block_seconds": interleaver.watchdog.seconds,
            "graphs": 0 if self.nnsight_graphs is None else self.nnsight_graphs.recorded,
            "strikes": interleaver.watchdog.total,
            "replays": interleaver.log.replays,
            "exchanges": interleaver.exchanges,
            "constants": self.nnsight_blocks.constants.count,
            "constant_bytes": self.nnsight_blocks.constants.bytes,
        }

    def shutdown(self) -> None:
        if hasattr(self, "nnsight_outbox"):
            self.nnsight_outbox.close()
            self.nnsight_blocks.interleaver.watchdog.close()
        super().shutdown()  # type: ignore[misc]

    def _nnsight_boot(self) -> None:
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        entry = V2Entry if getattr(self, "use_v2_model_runner", False) else V1Entry
        entry.check(runner)
        model = runner.model
        graphs = entry.graphs(runner)

        def forward() -> None:
            with nullcontext() if graphs is None else graphs.eager():
                hidden = entry.dummy_forward(runner)
                if pipeline is None or pipeline.leads:
                    model.compute_logits(hidden[:1])

        pipeline = PipelineParallel(runner) if self.parallel_config.pipeline_parallel_size > 1 else None  # type: ignore[attr-defined]
        group = pipeline or TensorParallel.of(runner)
        streams = Streams(group.observed)
        calls = record(model, forward, streams)
        manifest = describe(model, repo=runner.model_config.model, vllm_version=vllm.__version__, calls=calls)
        manifest = manifest if pipeline is None else pipeline.whole(manifest)
        self.nnsight_manifest = manifest
        outbox = Outbox if group.leads else NoOutbox if pipeline is None else Unheard
        self.nnsight_outbox = outbox(inbox_address(os.environ[HOME]), runner.device)
        view = ModelView(Envoy(manifest))
        limits = Limits(runner.model_config.get_vocab_size(), runner.model_config.max_model_len)
        interleaver = group.interleaver(
            model, order_of(manifest), self.nnsight_outbox.report, view, aliases_of(manifest), limits
        )
        if interleaver.plans:
            interleaver.crews.report = self.nnsight_outbox.report_together
        cache = self.vllm_config.cache_config  # type: ignore[attr-defined]
        recycling = Recycling(model, cache.num_gpu_blocks, cache.block_size)
        keep_warnings()
        manager = getattr(runner, "lora_manager", None)
        self.nnsight_agree = group.agree
        self.nnsight_adapters = Adapters(self, manager, group.agree)  # type: ignore[arg-type]
        blocks = StagedBlocks if pipeline is not None else Blocks if group.leads else FollowingBlocks
        self.nnsight_blocks = blocks(interleaver, self.nnsight_outbox, runner.device, recycling, self.nnsight_adapters)
        self.nnsight_blocks.ops = ops_of(runner, interleaver, manifest, streams, self.nnsight_op_sites)
        if graphs is not None:
            graphs.interleaver = interleaver
        self.nnsight_graphs = graphs
        entry(runner, self.nnsight_blocks, graphs)
        if pipeline is not None:
            pipeline.enter(self.nnsight_blocks)
        self.nnsight_runner = entry.__name__
