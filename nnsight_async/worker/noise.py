"""Lines that vLLM prints on every machine without a GPU, whatever its log level, and that ask nothing of anybody."""

from __future__ import annotations

import logging
import os
import warnings

DEBUG = os.environ.get("VLLM_LOGGING_LEVEL") == "DEBUG"


def hush_process() -> None:
    """Leave them out of a process of vLLM's, unless everything is to be seen."""
    hush_import()
    if not DEBUG:  # said of torch, by vLLM's look at all that torch has (0.32)
        warnings.filterwarnings("ignore", r"`torch\.distributed\.reduce_op` is deprecated", FutureWarning)


def hush_import() -> None:
    """Leave out what is logged while vLLM is imported, which is before it has set its log level (0.32)."""
    if not DEBUG:
        logging.getLogger("vllm.triton_utils.importing").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return "doesn't include CPU backend" not in record.getMessage()
