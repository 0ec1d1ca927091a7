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
        names = {path.name}
    else:
        names = _model_files(path) or {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    return _hashed(path, names)


def hashed_again(recorded: Input) -> Input:
    """The same files as they are now, and files that came to a model. Raises OSError."""
    path = Path(recorded.path)
    return _hashed(path, {*recorded.files, *_model_files(path)})


def _model_files(directory: Path) -> set[str]:
    """The names of a model's files; none for another directory or a file."""
    if not any((directory / name).is_file() for name in _MODEL_CONFIGS):
        return set()
    return {file.name for file in directory.iterdir() if file.suffix in _OF_A_MODEL and file.is_file()}


def _hashed(path: Path, names: set[str]) -> Input:
    """The SHA-256 of those of the files that exist."""
    parent = path.parent if path.is_file() else path
    there = sorted(name for name in names if (parent / name).is_file())
    with ThreadPoolExecutor(_THREADS) as threads:
        sums = list(threads.map(sha256, [parent / name for name in there]))
    return Input(path=str(path), files=dict(zip(there, sums, strict=True)))


def _names_file(text: object) -> bool:
    return isinstance(text, str) and "\n" not in text and len(text) < _LONGEST_PATH and Path(text).is_file()
