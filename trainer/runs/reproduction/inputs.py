"""The files that a run reads, by the setting that names each."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import BaseModel

from trainer.records.files.checksums import sha256
from trainer.runs.reproduction.certificate import Input

_THREADS = 4  # beside a run that starts
_WRITTEN = ("trainer", "data.cache_dir")  # what the run writes, or reads back of its own
_MODEL_CONFIGS = ("config.json", "adapter_config.json")
_OF_A_MODEL = {".json", ".jinja", ".model", ".safetensors", ".txt"}
_LONGEST_PATH = 4096


def named_paths(settings: BaseModel, prefix: str = "") -> Iterator[tuple[str, Path]]:
    """Each file or directory that the settings name and a run reads, like ("data.train_files.0", PATH)."""
    for name in type(settings).model_fields:
        value, setting = getattr(settings, name), f"{prefix}{name}"
        if setting in _WRITTEN:
            continue
        if isinstance(value, BaseModel):
            yield from named_paths(value, f"{setting}.")
        elif isinstance(value, Path):
            yield setting, value
        elif isinstance(value, Sequence) and not isinstance(value, str):
            yield from ((f"{setting}.{at}", item) for at, item in enumerate(value) if isinstance(item, Path))
        elif setting == "data.chat_template" and _names_file(value):
            yield setting, Path(value)


def hashed_input(path: Path) -> Input:
    """The SHA-256 of a file, of a model's files, or of all files below another directory. Raises OSError."""
    if path.is_file():
        files = [path]
    elif any((path / name).is_file() for name in _MODEL_CONFIGS):
        files = [file for file in path.iterdir() if file.suffix in _OF_A_MODEL and file.is_file()]
    else:
        files = [file for file in path.rglob("*") if file.is_file()]
    parent = path.parent if path.is_file() else path
    ordered = sorted(files)
    with ThreadPoolExecutor(_THREADS) as threads:
        sums = list(threads.map(sha256, ordered))
    return Input(
        path=str(path), files={str(file.relative_to(parent)): own for file, own in zip(ordered, sums, strict=True)}
    )


def _names_file(text: object) -> bool:
    return isinstance(text, str) and "\n" not in text and len(text) < _LONGEST_PATH and Path(text).is_file()
