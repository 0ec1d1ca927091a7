"""What a job needs of its user: variables of accounts, which every runtime gets by name, and the Hub's cache.

Values never reach a command line or a text. A value that is a path of this machine means nothing in a container: it
stays here, except for HF_HOME, which is mounted.
"""

import fnmatch
import logging
import re
from collections.abc import Iterable, Mapping

from buildkit.host.accelerators import Flag

log = logging.getLogger(__name__)

HUB = "/huggingface"  # where containers find the Hub's cache
HUB_VARIABLE = "HF_HOME"
ACCOUNTS = {
    "HF_*": "the Hugging Face Hub: your token for gated models, a mirror, offline use",
    "HUGGING_FACE_HUB_TOKEN": "your token for the Hugging Face Hub, by its old name",
    "TRANSFORMERS_OFFLINE": "whether Transformers may ask the Hub",
    "WANDB_*": "Weights & Biases: your key, its server, the project's entity",
    "MLFLOW_*": "MLflow: its server and your account there",
    "SWANLAB_*": "SwanLab: your key, its server",
    "TRACKIO_*": "Trackio: where its runs are kept and shown",
}
"""Patterns of variables that are passed on if they are set, each with its reason."""
PATHS = ("/", "./", "../", "~", "file:", "sqlite:")


def account_flags(variables: Mapping[str, str], asked: Iterable[str] = ()) -> tuple[Flag, ...]:
    """The account variables that are set here, by name; not those of `--env`, which are `asked` for."""
    theirs = {variable.partition("=")[0] for variable in asked} | {HUB_VARIABLE}
    flags = []
    for pattern, reason in ACCOUNTS.items():
        for name in sorted(fnmatch.filter(variables, pattern)):
            if name in theirs or not variables[name] or not re.fullmatch("[A-Z0-9_]+", name):
                continue
            if variables[name].startswith(PATHS):
                log.warning("%s is a path of this machine: mount it, and write --env %s=PATH", name, name)
            else:
                flags.append(Flag("env", name, reason))
    return tuple(flags)
