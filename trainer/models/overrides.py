"""`model.override_config`: a model directory with other entries in its config.json."""

import difflib
import hashlib
import json
from pathlib import Path
from typing import Any, TypeVar

from trainer.config.tree import WorkersConfig
from trainer.errors import ConfigError, DataError
from trainer.records.files.atomic import atomic_directory

C = TypeVar("C", bound=WorkersConfig)

# Entries that this trainer decides, and the setting that does.
OTHER_SETTINGS = {"dtype": "model.dtype", "torch_dtype": "model.dtype", "vocab_size": "model.path"}

# More than any model has.
MOST_LAYERS = 10_000


def with_overrides(config: C) -> C:
    """The settings with `model.path` replaced by a directory whose config.json has the entries of
    `model.override_config`.

    Its other files are links to those of the model. It lies in `trainer.output_dir`, which every node sees, so that
    training, engines, checks and export all read the same entries. Raises ConfigError for an entry that the model does
    not have or that another setting decides.
    """
    changed = config.model.override_config
    if not changed:
        return config
    source = config.model.directory
    settings = _settings(source)
    _check(changed, source, settings)
    text = json.dumps(settings | changed, indent=2, sort_keys=True) + "\n"
    digest = hashlib.sha256(f"{source.absolute()}\n{text}".encode()).hexdigest()[:12]
    directory = config.trainer.output_dir.expanduser().absolute() / "overridden-models" / f"{source.name}-{digest}"
    if not directory.is_dir():
        directory.parent.mkdir(parents=True, exist_ok=True)
        with atomic_directory(directory) as partial:
            for file in source.iterdir():
                if file.name != "config.json":
                    (partial / file.name).symlink_to(file.resolve())
            (partial / "config.json").write_text(text, encoding="utf-8")
    return config.model_copy(update={"model": config.model.model_copy(update={"path": directory})})


def _settings(model: Path) -> dict[str, Any]:
    file = model / "config.json"
    try:
        if file.exists() and not file.is_file():
            raise OSError("not a regular file")  # reading a pipe or a device might never end
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{model}/config.json: cannot be read: {error}", hint="set model.path to a model") from error
    if not isinstance(settings, dict):
        raise DataError(f"{model}/config.json: not a JSON object", hint="set model.path to a model")
    check_layers(model / "config.json", settings)
    return settings


def check_layers(file: Path, settings: dict[str, Any]) -> None:
    """Raises DataError for a number of layers that no model has: Transformers makes a list as long as it."""
    for part in (settings, settings.get("text_config")):
        layers = part.get("num_hidden_layers") if isinstance(part, dict) else None
        if isinstance(layers, int) and layers > MOST_LAYERS:
            raise DataError(
                f"{file}: num_hidden_layers is larger than {MOST_LAYERS:,}",
                hint="restore the file from the model's source",
            )


def _check(changed: dict[str, Any], model: Path, settings: dict[str, Any]) -> None:
    from trainer.models.pretrained import read_config  # takes seconds, and few runs need it

    known = {*settings, *read_config(model).to_dict(), "rope_scaling"}
    for name, value in changed.items():
        if name in OTHER_SETTINGS:
            raise ConfigError(
                f"model.override_config: {name} is not an entry to override", hint=f"set {OTHER_SETTINGS[name]}"
            )
        if name in ("attn_implementation", "_attn_implementation"):
            raise ConfigError(
                f"model.override_config: {name}={value} cannot be chosen: attention is computed within packed rows",
                hint="leave it out; the log-probs are those of every implementation",
            )
        if ("dropout" in name or name.endswith("_pdrop")) and value:
            raise ConfigError(
                f"model.override_config: {name}={value}: dropout stays off, because the ratio of new to old "
                "log-probs would measure its noise",
                hint="set it to 0, or leave it out",
            )
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(
                f"model.override_config: {model}/config.json has no entry {name}",
                hint=f"did you mean {near[0]}?" if near else "use a name of the model's configuration in Transformers",
            )
