"""Whether there is a model of a name, asked before the seconds that vLLM takes to be imported, and to find out."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from nnsight_async.tree.cache import hub_folder

SECONDS = 5.0
"""What the hub has for its answer."""


@functools.lru_cache
def check_repository(repo: str, revision: str | None = None, token: str | bool | None = None) -> None:
    """Raise `OSError` for a folder that does not exist, or a repository that neither the hub's cache nor the hub has.

    The hub is asked only for what its cache has nothing of. Its client, and with it vLLM, asks again for half a minute
    before it says that it cannot be reached. Names of other places (`s3://...`) are left to vLLM.
    """
    if Path(repo).exists() or "://" in repo or os.environ.get("VLLM_USE_MODELSCOPE"):
        return
    if repo.startswith((".", "/", "~")):
        raise FileNotFoundError(f"{repo!r} does not exist")
    if not any(hub_folder(repo).glob("snapshots/*")):
        _ask_hub(repo, revision, token)


def _ask_hub(repo: str, revision: str | None, token: str | bool | None) -> None:
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    absent = f"{repo!r} is neither a folder nor in the hub's cache ({hub_folder(repo).parent})"
    fetch = "give the folder of a checkpoint, or fetch the repository where there is a network"
    try:
        get_hf_file_metadata(hf_hub_url(repo, "config.json", revision=revision), token=token, timeout=SECONDS)
    except HFValidationError:
        return  # a form of name that vLLM may know
    except OfflineModeIsEnabled:
        raise FileNotFoundError(
            f"{absent}, and HF_HUB_OFFLINE keeps the hub from being asked: unset it, or {fetch}"
        ) from None
    except HfHubHTTPError as error:
        if error.response.status_code in (401, 403) or _is_missing(error):
            raise OSError(f"{absent}, and the hub does not give it: {error}") from None
    except Exception as error:  # of whatever library the hub's client uses
        raise OSError(
            f"{absent}, and {constants.ENDPOINT} cannot be reached ({type(error).__name__}: {error}): {fetch}. With "
            "HF_HUB_OFFLINE=1 nothing is asked of the hub"
        ) from None


def _is_missing(error: Exception) -> bool:
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    return isinstance(error, (RepositoryNotFoundError, RevisionNotFoundError))
