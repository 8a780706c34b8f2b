"""Single files of repositories on the Hugging Face hub."""

from contextlib import suppress
from pathlib import Path
from typing import Literal


def newest_file(repository: str, name: str, kind: Literal["dataset", "model"]) -> Path:
    """The newest version of a small file, in the cache of the hub's library; without a network, the last one that was seen.

    Raises:
        Exception: the error of the network or the hub, of any type, if the file has never been seen.
    """
    import huggingface_hub

    try:
        # Fails at once without a network; the download alone would retry.
        huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(repository, name, repo_type=kind))
        return Path(huggingface_hub.hf_hub_download(repository, name, repo_type=kind))
    except Exception:
        with suppress(ValueError):  # the name is not a valid one
            seen = huggingface_hub.try_to_load_from_cache(repository, name, repo_type=kind)
            if isinstance(seen, str):
                return Path(seen)
        raise
