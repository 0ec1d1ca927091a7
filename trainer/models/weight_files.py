"""The safetensors files of models: their headers, and whether they are complete."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from trainer.config.tree import WorkersConfig
from trainer.errors import DataError
from trainer.models.files import read_json

_LONGEST_HEADER = 100_000_000  # bytes, safetensors' own limit
_HINT = "download the model again, or copy that file anew"
_MODEL, _INDEX, _ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"


def parameter_count(model: Path) -> int:
    """The number of parameters in a model's safetensors files, read from their headers; 0 without such files.

    Raises DataError if a header is damaged.
    """
    return sum(_parameters_in(file) for file in model.glob("*.safetensors"))


def _parameters_in(file: Path) -> int:
    """The number of parameters in one file.

    The format: eight bytes with the length of a JSON object, then that object with the shape of every tensor.
    """
    try:
        if not file.is_file():
            raise OSError("not a regular file")
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(min(length, _LONGEST_HEADER)))
        return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{file}: not a readable safetensors file: {error}", hint=_HINT) from error


def check_weights(config: WorkersConfig) -> None:
    """Checks that the weights of every model and adapter of a run are there and complete, without reading them.

    Raises DataError, which names the file.
    """
    critic = config.critic if config.needs_critic else None
    models = {
        "model.path": config.model.directory,
        "critic.path": critic.path if critic else None,
        "reward.model.path": config.reward.model.path,
        "distillation.teacher": config.distillation.teacher,
    }
    for setting, model in models.items():
        if model is not None:
            _check_model(model, setting)
    for lora in (config.actor.lora, *([critic.lora] if critic else [])):
        if lora.path is not None:
            with _opened(lora.path / _ADAPTER):
                pass


def weight_files(model: Path) -> list[Path]:
    """The safetensors files that Transformers would load. Raises OSError or ValueError if there are none."""
    if (model / _MODEL).is_file():
        return [model / _MODEL]
    places = json.loads((model / _INDEX).read_text(encoding="utf-8"))["weight_map"]
    return [model / name for name in sorted(set(places.values()))]


def _check_model(model: Path, setting: str) -> None:
    """Looks at the files that Transformers would load. A pipe or a device among them might never end."""
    for file in model.iterdir() if model.is_dir() else ():
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise DataError(f"{file}: not a regular file", hint=_HINT)
    if (model / _MODEL).is_file():
        with _opened(model / _MODEL):
            return
    if not (model / _INDEX).is_file():
        raise DataError(
            f"{setting}={model}: no weights: neither {_MODEL} nor {_INDEX} exists",
            hint="download the model again, or save it with save_pretrained, which writes safetensors",
        )
    places = read_json(model / _INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise DataError(f"{model / _INDEX}: no weight_map of names", hint=_HINT)
    for name in sorted(set(places.values())):
        with _opened(model / name) as weights:
            held = set(weights.keys())
        absent = sorted(weight for weight, file in places.items() if file == name and weight not in held)
        if absent:
            raise DataError(f"{model / name}: lacks {absent[0]}, which {_INDEX} names", hint=_HINT)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """A file whose header fits its size. Raises DataError."""
    try:
        with safe_open(file, "np") as weights:
            yield weights
    except (OSError, SafetensorError) as error:
        raise DataError(f"{file}: not a readable safetensors file: {error}", hint=_HINT) from error
