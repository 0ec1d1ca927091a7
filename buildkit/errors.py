"""Errors on the host. Each class is one cause with its own exit code, printed once, without a traceback.

| exit code | class | cause |
| --- | --- | --- |
| 2 | `UsageError` | an unknown target, variant or option |
| 3 | `MatrixError` | `images/` or slipway.toml is missing, malformed or contradicts itself |
| 4 | `EngineError` | no container engine answers, or it lacks what is needed |
| 5 | `BuildError` | the engine could not build the image |
| 6 | `LockError` | a lock is missing, stale, or could not be resolved |
| 7 | `DiskError` | too little free space |
| 8 | `BaseError` | no provider could supply the base image |
| 9 | `RunError` | containers or their network could not be started |
| 10 | `ExportError` | an image could not be written into a file |
| 11 | `SettingsError` | a file with this host's settings is malformed or cannot be read |
| 16 | `PlanError` | pins do not fit together, or two builds differ |
| 20 | `RegistryError` | a registry refuses, is full, does not answer, or holds damaged content |
| 21 | `InventoryError` | an image's content cannot be described |
| 22 | `PublishError` | publishing stopped before promotion; nothing was promoted |
| 23 | `SignatureError` | cosign is absent or could not sign |
| 24 | `TrustError` | a published image is not what it claims to be |
| 25 | `CertificateError` | a part of an image failed on this machine |
| 26 | `WarmCacheError` | a warm cache could not be made, is damaged, or does not fit |
| 27 | `ExtensionError` | what a user adds to an image contradicts it, or cannot be had |

`buildkit run` exits with the status of its command, `buildkit test` with pytest's, `buildkit doctor` with 1 when a
check failed.
"""


class BuildkitError(Exception):
    """Base class: what failed and where, and in `hint` how to fix it."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(printable(message))
        self.hint = printable(hint)


def printable(text: str) -> str:
    """The text without what controls a terminal: servers and files that we quote may be anybody's."""
    return "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text)


class UsageError(BuildkitError):
    exit_code = 2


class MatrixError(BuildkitError):
    exit_code = 3


class EngineError(BuildkitError):
    exit_code = 4


class BuildError(BuildkitError):
    exit_code = 5


class LockError(BuildkitError):
    exit_code = 6


class DiskError(BuildkitError):
    exit_code = 7


class BaseError(BuildkitError):
    exit_code = 8


class RunError(BuildkitError):
    exit_code = 9


class ExportError(BuildkitError):
    exit_code = 10


class SettingsError(BuildkitError):
    exit_code = 11


class PlanError(BuildkitError):
    exit_code = 16


class RegistryError(BuildkitError):
    exit_code = 20


class UnreachableError(RegistryError):
    """The registry did not answer, or lets us not in. What it holds was not judged."""


class InventoryError(BuildkitError):
    exit_code = 21


class PublishError(BuildkitError):
    exit_code = 22


class SignatureError(BuildkitError):
    exit_code = 23


class TrustError(BuildkitError):
    exit_code = 24


class CertificateError(BuildkitError):
    exit_code = 25


class WarmCacheError(BuildkitError):
    exit_code = 26


class ExtensionError(BuildkitError):
    exit_code = 27
