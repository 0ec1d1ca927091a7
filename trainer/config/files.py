"""Settings in YAML: the user's files, and the presets in `trainer/config/presets/`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from trainer.errors import ConfigError

PRESETS = Path(__file__).with_name("presets")


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def read_settings(name: str) -> dict[str, Any]:
    """The settings of a preset or a YAML file, by dotted key.

    Raises ConfigError if the file does not exist or is not a mapping of settings.
    """
    preset, path = PRESETS / f"{name}.yaml", Path(name)
    if name in preset_names():
        path = preset
    hint = f"give a YAML file or one of the presets {', '.join(preset_names())}"
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: cannot be read: {error}", hint=hint) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not YAML: {error}", hint=hint) from error
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{name}: not a mapping of settings", hint=hint)
    return dict(_leaves(tree, ""))


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
