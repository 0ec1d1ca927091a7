"""Models and data sets of the Hugging Face hub, or of the mirror that HF_ENDPOINT names; HF_TOKEN names the account."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from trainer.errors import DataError

Kind = Literal["model", "data set"]
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(?<!\.json)(?<!\.jsonl)(?<!\.parquet)")
"""OWNER/NAME of a repository, which does not end like a data file."""


def download(name: str, kind: Kind, patterns: Sequence[str], where: str, instead: str) -> Path:
    """The folder of a repository's snapshot with the files that match; files in the cache are not fetched again.

    `where` begins an error, like `model.path=NAME:`, and `instead` is what else its hint offers. Raises DataError if
    the repository is gated, missing or out of reach, or if the package huggingface_hub is missing.
    """
    with _explained(name, kind, where, instead):
        from huggingface_hub import snapshot_download  # a slow import that few commands need

        repo_type = "model" if kind == "model" else "dataset"
        return Path(snapshot_download(name, repo_type=repo_type, allow_patterns=list(patterns))).absolute()


def push_model(directory: Path, name: str, private: bool = False) -> str:
    """Uploads a model's directory in one commit to the repository OWNER/NAME, created if needed; its address.

    Raises DataError if the hub refuses it or is out of reach, or if the package huggingface_hub is missing.
    """
    where, instead = f"--push-to-hub {name}:", f"upload {directory}, where the model is, in another way"
    with _explained(name, "model", where, instead, verb="write to"):
        from huggingface_hub import HfApi

        hub = HfApi()
        address = hub.create_repo(name, private=private, exist_ok=True)
        hub.upload_folder(repo_id=name, folder_path=directory, commit_message=f"Upload {directory.name}")
        return str(address)


def repository_of(snapshot: Path) -> str | None:
    """OWNER/NAME of the model whose snapshot in the hub's cache this is; None for another directory."""
    kind, _, name = snapshot.parent.parent.name.partition("--")
    return name.replace("--", "/", 1) if kind == "models" and snapshot.parent.name == "snapshots" else None


@contextmanager
def _explained(name: str, kind: Kind, where: str, instead: str, verb: str = "read") -> Iterator[None]:
    """Raises DataError for what the hub's client raises inside."""
    try:
        from huggingface_hub import get_token
        from huggingface_hub.constants import ENDPOINT
        from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError
    except ModuleNotFoundError as error:
        raise DataError(
            f"{where} the package huggingface_hub is missing here",
            hint=f"pip install 'slipway-rl[trainer]', or {instead}",
        ) from error
    from httpx import HTTPError  # of huggingface_hub's own client

    account = "this account" if get_token() else "a user without a token"
    try:
        yield
    except GatedRepoError as error:
        page = f"{ENDPOINT}/{name}" if kind == "model" else f"{ENDPOINT}/datasets/{name}"
        raise DataError(
            f"{where} the {kind} is gated, and {account} may not {verb} it",
            hint=f"accept its terms at {page}, then set HF_TOKEN to a token of the account, or {instead}",
        ) from error
    except RepositoryNotFoundError as error:
        raise DataError(
            f"{where} no such {kind} on the hub, or a private one",
            hint=f"check the name, set HF_TOKEN if the {kind} is private, or {instead}",
        ) from error
    except (HTTPError, OSError, ValueError) as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
            raise DataError(
                f"{where} {account} may not {verb} it", hint=f"set HF_TOKEN to a token that may, or {instead}"
            ) from error
        mirror = os.environ.get("HF_ENDPOINT", "")
        action = "provide it" if verb == "read" else "take it"
        raise DataError(
            f"{where} the Hugging Face hub{mirror and f' at {mirror}'} did not {action}: {error}",
            hint=f"set HF_ENDPOINT to a mirror that you can reach, or {instead}",
        ) from error
