"""Reads from the configuration files of pip and uv where packages come from.

Sources: https://pip.pypa.io/en/stable/topics/configuration/ and https://docs.astral.sh/uv/concepts/configuration-files/.
"""

import configparser
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buildkit.errors import SettingsError
from buildkit.host.files import settings_text

PIP_KEYS = ("index-url", "extra-index-url", "find-links", "trusted-host", "cert")


@dataclass(frozen=True)
class UvFiles:
    """Package sources from uv's files; empty values where they set none."""

    default_index: str = ""
    indexes: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    trusted_hosts: tuple[str, ...] = ()


# ---- pip -------------------------------------------------------------------------------------------------------------


def read_pip(environ: Mapping[str, str], root: Path, home: Path) -> dict[str, str]:
    """The values of `PIP_KEYS` that pip would use: of its files from the least to the most specific, then variables.

    Raises `SettingsError` for a malformed file.
    """
    values: dict[str, str] = {}
    for path in pip_files(environ, root, home):
        parser = configparser.RawConfigParser()
        try:
            parser.read_string(settings_text(path), str(path))
        except configparser.Error as error:  # its own text shows the line, and with it a password
            kind = type(error).__name__.removesuffix("Error")
            raise SettingsError(f"{path}{line_of(error)} is no configuration of pip ({kind})", "correct it") from error
        for section in ("global", "install"):
            if parser.has_section(section):
                values |= {key: value for key, value in parser.items(section) if key in PIP_KEYS}
    variables = {name: environ.get(f"PIP_{name.upper().replace('-', '_')}") for name in PIP_KEYS}
    return values | {name: value for name, value in variables.items() if value}


def line_of(error: configparser.Error) -> str:
    first = next(iter(getattr(error, "errors", ())), (getattr(error, "lineno", None), ""))[0]
    return f", line {first}," if first else ""


def pip_files(environ: Mapping[str, str], root: Path, home: Path) -> list[Path]:
    """The files that pip reads: with `PIP_CONFIG_FILE=/dev/null` none, otherwise that one last."""
    explicit = environ.get("PIP_CONFIG_FILE")
    if explicit == os.devnull:
        return []
    config = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    files = [root / "etc/xdg/pip/pip.conf", root / "etc/pip.conf", home / ".pip/pip.conf", config / "pip/pip.conf"]
    return [path for path in (*files, *([Path(explicit)] if explicit else [])) if path.exists()]


# ---- uv --------------------------------------------------------------------------------------------------------------


def read_uv(environ: Mapping[str, str], root: Path, home: Path) -> UvFiles:
    """uv settings: `index`, `index-url`, `extra-index-url`, `find-links`, also below `[pip]`; trusted hosts.

    An index that is `explicit` serves only packages that a project names, so none here. Raises `SettingsError` for a
    malformed file.
    """
    default, indexes, links, hosts = "", [], [], []
    for path in uv_files(environ, root, home):
        try:
            table = tomllib.loads(settings_text(path))
        except (ValueError, RecursionError) as error:  # a number of thousands of digits is no TOMLDecodeError
            raise SettingsError(f"{path} is no TOML: {error}", "correct or remove it") from error
        for settings in (table, value_of(table, "pip", dict, path) or {}):
            for index in value_of(settings, "index", list, path) or []:
                url = value_of(index if isinstance(index, dict) else {}, "url", str, path)
                if url is None:
                    raise SettingsError(f"{path}: an `index` has no `url`", "correct or remove it")
                if index.get("default") is True:
                    default = default or url
                elif index.get("explicit") is not True:
                    indexes.append(url)
            default = default or value_of(settings, "index-url", str, path) or ""
            indexes += texts_of(settings, "extra-index-url", path)
            links += texts_of(settings, "find-links", path)
            hosts += texts_of(settings, "allow-insecure-host", path)
    return UvFiles(default, tuple(indexes), tuple(links), tuple(hosts))


def uv_files(environ: Mapping[str, str], root: Path, home: Path) -> list[Path]:
    """The user's file, which comes first, and the system's; or the one that `UV_CONFIG_FILE` names."""
    if environ.get("UV_NO_CONFIG", "").lower() in ("1", "true", "yes", "on"):
        return []
    if explicit := environ.get("UV_CONFIG_FILE"):
        return [Path(explicit)]
    config = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    system = next((path for path in (root / "etc/xdg/uv/uv.toml", root / "etc/uv/uv.toml") if path.exists()), None)
    return [path for path in (config / "uv/uv.toml", system) if path and path.exists()]


def texts_of(settings: Mapping[str, Any], key: str, path: Path) -> list[str]:
    values = value_of(settings, key, list, path) or []
    if not all(isinstance(value, str) for value in values):
        raise SettingsError(f"{path}: `{key}` is not a list of texts", "correct or remove it")
    return list(values)


def value_of(settings: Mapping[str, Any], key: str, kind: type, path: Path) -> Any:
    """The value of a key, None if it is absent. Raises `SettingsError` for a value of another kind."""
    value = settings.get(key)
    if value is not None and not isinstance(value, kind):
        raise SettingsError(f"{path}: `{key}` is a {type(value).__name__}", f"write a {kind.__name__} there")
    return value
