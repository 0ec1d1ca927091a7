"""The `SLIPWAY_` variables that exist. Any other is a mistake: a misspelt name would leave each node alone."""

import difflib
import re
from collections.abc import Mapping

from entrypoints.errors import UsageError

PREFIX = "SLIPWAY_"
OF_LAUNCH = (
    *("HOSTS", "HOSTFILE", "NODES", "NODE_RANK", "HEAD", "SINGLE", "SERVICE", "PODS_PER_JOB", "JOB_ID"),
    *("TOKEN", "TOKEN_FILE", "JOB_DIR", "DEADLINE", "CONTROL_PORT", "MIN_NODES", "SPARES", "MAX_RESTARTS", "TLS"),
    *("DASHBOARD", "HCAS", "INTERFACE", "CACHE_DIR", "LOG_DIR", "REPORT_DIR", "NODE_COUNT", "READY_FD"),
)
"""Variables that `launch` reads or sets for the command."""
OF_OTHERS = (
    *("REGISTRY", "REGISTRY_USER", "REGISTRY_PASSWORD", "REGISTRY_CA", "INDEX_MIRRORS", "WARM_KEY", "BUILDER"),
    *("SIGN_KEY", "SIGN_KEYLESS", "IMAGE_STORE", "DOCKER_WITHOUT_BUILDX", "ROOTLESS_USER", "REHEARSE_ON_CPU"),
    *("CI_READY", "DEMO_ID", "DEMO_SEED", "CHAOS_JOB", "TEST", "TEST_IMAGE", "TEST_TARGET", "TEST_RUN", "TEST_NOFILE"),
)
"""Variables of `buildkit`, `ci` and the tests, which a job may inherit."""
_LIKE = 0.6
"""The likeness of two names, from 0 to 1, above which one may be meant by the other."""
_SERVICE_LINK = re.compile(r"SLIPWAY(?:_\w+)?_(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT_\d+_[A-Z]+(?:_[A-Z]+)?)")
"""Kubernetes sets these in every pod of a namespace for each of its services: here for one called `slipway`."""


def refuse_unknown(variables: Mapping[str, str]) -> None:
    """Raise UsageError for a `SLIPWAY_` variable that nothing reads, with the nearest name."""
    known = [PREFIX + name for name in (*OF_LAUNCH, *OF_OTHERS)]
    for name, value in sorted(variables.items()):
        if not name.startswith(PREFIX) or name in known or _SERVICE_LINK.fullmatch(name):
            continue
        if name.endswith("_PORT") and "://" in value:
            continue  # of a service too
        nearest = _nearest(name)
        raise UsageError(
            f"{name} is not a variable of launch",
            f"{f'did you mean {nearest}? ' if nearest else ''}`launch --help` lists the variables",
        )


def _nearest(name: str) -> str:
    """The variable of `launch` whose name is most like this one: one with all its words, else by its letters."""
    bare = name.removeprefix(PREFIX)

    def likeness(known: str) -> float:
        whole = set(bare.split("_")) <= set(known.split("_"))
        return whole + difflib.SequenceMatcher(None, bare.replace("_", ""), known.replace("_", "")).ratio()

    best = max(OF_LAUNCH, key=likeness)
    return PREFIX + best if likeness(best) > _LIKE else ""
