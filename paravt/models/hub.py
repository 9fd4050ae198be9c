"""Models that are no directory here: is the Hugging Face hub there, and has it the model?

Asked once before anything is loaded: loading by itself tries each of its files again and again, in silence.
"""

from __future__ import annotations

import logging
from pathlib import Path

import httpx2
from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import RepositoryNotFoundError

from paravt.errors import ModelError
from paravt.model_names import NEITHER, check_name

log = logging.getLogger(__name__)

ENDPOINT = constants.ENDPOINT
_TIMEOUT = 10.0
"""Seconds."""


def find_model(path: str | Path) -> bool:
    """Whether the model is on this machine: a directory, or in the cache of a hub that cannot be reached.

    Says so if it asks the hub. Raises ModelError in one line if there is no such directory and `path` is no hub id, if
    the hub has no such model, or if it can't be reached and the model is not in the cache.
    """
    name = str(path)
    if Path(path).is_dir():
        return True
    check_name(name)
    log.warning("%s: no such directory here; asking the hub at %s", name, ENDPOINT)
    try:
        HfApi(endpoint=ENDPOINT).model_info(name, timeout=_TIMEOUT)
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{name}: no such directory here, and no such model on the hub (a private one needs HF_TOKEN)"
        ) from error
    except ValueError as error:
        raise ModelError(f"{name}: {NEITHER}") from error
    except (httpx2.HTTPError, OSError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            raise ModelError(f"{name}: no such directory here, and the hub cannot be asked: {reason}") from error
        log.warning("%s: the hub cannot be asked (%s); using the copy in the cache", name, reason)
        return True
    return False
