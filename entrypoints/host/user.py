"""A home and a name for Python programs of a user without an entry in /etc/passwd: `docker run --user 12345`.

`slipway_user.pth` runs `complete` when Python starts, also where `docker exec` or another entrypoint starts it.
"""

import os
import pwd
from collections.abc import MutableMapping


def complete(environment: MutableMapping[str, str]) -> None:
    """Add the variables that `launch` gives its children; none for a user with an entry, or where it fails."""
    try:
        pwd.getpwuid(os.getuid())
        return
    except KeyError:
        pass
    home = environment.get("HOME", "")
    if home.strip("/") and os.access(home, os.W_OK | os.X_OK) and environment.get("USER"):
        return
    from entrypoints.errors import UsageError  # most programs need neither
    from entrypoints.host.child_environment import for_any_user

    try:
        environment.update(for_any_user(environment))
    except (UsageError, OSError):  # `launch` names the reason; other programs start as they are
        return
