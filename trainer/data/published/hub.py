"""Files of data sets on the Hugging Face hub, or on the mirror that HF_ENDPOINT names."""

import os
from pathlib import Path

from trainer.errors import DataError

_OFFLINE = "or read a local copy with --from, or make rows up with --synthetic N"


def download(repository: str, patterns: list[str]) -> Path:
    """The folder of a data set's snapshot with the files that match; files in the cache are not fetched again.

    Raises DataError if the data set is gated, missing or out of reach, or if the package huggingface_hub is missing.
    """
    try:
        from huggingface_hub import snapshot_download  # a slow import that few commands need
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    except ModuleNotFoundError as error:
        raise DataError(
            f"{repository}: the package huggingface_hub is missing here",
            hint=f"pip install 'slipway-rl[trainer]' again, {_OFFLINE}",
        ) from error
    try:
        return Path(snapshot_download(repository, repo_type="dataset", allow_patterns=patterns))
    except GatedRepoError as error:
        raise DataError(
            f"{repository}: the data set is gated, and this account may not read it",
            hint=f"accept its terms on its page, then set HF_TOKEN to a token of the account, {_OFFLINE}",
        ) from error
    except RepositoryNotFoundError as error:
        raise DataError(
            f"{repository}: no such data set on the hub, or a private one",
            hint=f"check the name, set HF_TOKEN for a private one, {_OFFLINE}",
        ) from error
    except (OSError, ValueError) as error:
        mirror = os.environ.get("HF_ENDPOINT", "")
        raise DataError(
            f"{repository}: the Hugging Face hub{mirror and f' at {mirror}'} did not provide it: {error}",
            hint=f"set HF_ENDPOINT to a mirror that you can reach, {_OFFLINE}",
        ) from error
