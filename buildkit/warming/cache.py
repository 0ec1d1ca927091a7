"""A warm cache: what it holds, and what it fits.

The compilers name an entry by a digest of its source, its options, the device and their own versions, so an entry that
does not fit is never used. The key refuses a whole cache of such entries, which would cost space and no compilation
less. Inductor's digests contain the device's model, so an H100's cache is of no use on an H200.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from buildkit.errors import WarmCacheError
from buildkit.host.machine import Machine

SCHEMA = 1
MANIFEST = "warm.json"
PLACE = "/opt/slipway/warm"
"""Its folder in a container, which `launch` reads."""
SHORT = 12  # characters of a digest in a name


@dataclass(frozen=True)
class Key:
    """`lock` is `sha256:…`; `devices` are the distinct models of the GPUs, none on CPU; `driver` is empty on CPU."""

    lock: str
    devices: tuple[str, ...]
    driver: str


@dataclass(frozen=True)
class WarmCache:
    """The manifest: the key, the variant that compiled it, and the number and bytes of its files."""

    key: Key
    target: str
    variant: str
    files: int
    bytes: int

    @property
    def name(self) -> str:
        """A name for files and tags that tells the key: `warm-cuda-8f3a…-nvidia-h200-580.65.06`."""
        return name_of(self.target, self.key)


def name_of(target: str, key: Key) -> str:
    words = ("warm", target, key.lock.removeprefix("sha256:")[:SHORT], *key.devices, key.driver)
    return re.sub(r"[^a-z0-9.]+", "-", "-".join(word for word in words if word).lower())[:128].strip("-.")


def key_here(lock: str, target: str, machine: Machine) -> Key:
    """The key of a cache that an image with this lock makes on this machine."""
    gpus = machine.gpus[target]
    return Key(lock, gpus.models, gpus.driver or "")


def refuse_other_lock(cache: WarmCache, lock: str) -> None:
    """Raises `WarmCacheError` if the image that compiled it has another lock than `lock`."""
    if cache.key.lock != lock:
        raise WarmCacheError(
            f"the warm cache was compiled by {cache.target}-{cache.variant} with lock {short(cache.key.lock)}, "
            f"and the image has lock {short(lock)}",
            HINT,
        )


def refuse_other_machine(cache: WarmCache, here: Key) -> None:
    """Raises `WarmCacheError` if this machine has other GPUs or another driver than the one that compiled it."""
    if not set(here.devices) <= set(cache.key.devices):
        made, present = (" and ".join(devices) or "CPU" for devices in (cache.key.devices, here.devices))
        raise WarmCacheError(f"the warm cache was compiled on {made}, and this machine has {present}", HINT)
    if here.driver != cache.key.driver:
        raise WarmCacheError(
            f"the warm cache was compiled with driver {cache.key.driver or 'none'}, "
            f"and this machine has {here.driver or 'none'}",
            HINT,
        )


HINT = "make one with this image on such a machine: `buildkit warm`"


def short(lock: str) -> str:
    return lock.removeprefix("sha256:")[:SHORT]


def as_json(cache: WarmCache) -> bytes:
    return json.dumps({"schema": SCHEMA, **asdict(cache)}, indent=2, sort_keys=True).encode() + b"\n"


def read_json(content: bytes) -> WarmCache:
    """Raises `WarmCacheError` if it is no manifest of a warm cache."""
    try:
        document = json.loads(content)
        if document["schema"] != SCHEMA:
            raise WarmCacheError(
                f"the warm cache has schema {document['schema']}, and this buildkit reads {SCHEMA}", HINT
            )
        key = document["key"]
        devices = tuple(text(device) for device in key["devices"])
        return WarmCache(
            Key(text(key["lock"]), devices, text(key["driver"])),
            text(document["target"]),
            text(document["variant"]),
            count(document, "files"),
            count(document, "bytes"),
        )
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise WarmCacheError(f"this is no warm cache: its {MANIFEST} has a wrong {error}", HINT) from error


def text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"text: {value!r}")
    return value


def count(document: Mapping[str, Any], name: str) -> int:
    value = document[name]
    if type(value) is not int or value < 0:
        raise TypeError(f"{name}: {value!r}")
    return value
