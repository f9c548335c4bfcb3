"""What tests against a real engine need: tiny checkpoints made on the spot, and environments for vLLM without a GPU."""

from __future__ import annotations

from nnsight_async.testing.checkpoints import CHECKPOINTS, hf_model, tiny_checkpoint
from nnsight_async.testing.environment import quiet_environment, v2_runner_environment

__all__ = ["CHECKPOINTS", "hf_model", "quiet_environment", "tiny_checkpoint", "v2_runner_environment"]
