"""The file with the token: who else knows it."""

import os
from pathlib import Path

import pytest

from entrypoints.errors import TokenError
from entrypoints.wire import secret
from entrypoints.wire.secret import load_token

TOKEN = "0123456789abcdef"
OTHER, ME = 4711, 4712
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")


def token_file(directory: Path, owner: int, mode: int) -> dict[str, str]:
    path = directory / "token"
    path.write_text(TOKEN, encoding="ascii")
    os.chown(path, owner, -1)
    path.chmod(mode)
    return {"SLIPWAY_TOKEN_FILE": str(path)}


ACCEPTED = {
    "the user's own": (ME, ME, 0o600),
    "the user's own, for reading": (ME, ME, 0o400),
    "root's, which a group of the user may read": (ME, 0, 0o440),
    "another user's, in a container that runs as root": (0, ME, 0o600),
    "root's own": (0, 0, 0o600),
}
REFUSED = {
    "the user's own, for everybody": (ME, ME, 0o644, "can be read by others (mode 644)"),
    "the user's own, for a group": (ME, ME, 0o640, "can be read by others (mode 640)"),
    "another user's": (ME, OTHER, 0o600, f"belongs to another user (uid {OTHER})"),
    "another user's, for everybody": (ME, OTHER, 0o644, f"belongs to another user (uid {OTHER})"),
    "root's, for everybody": (ME, 0, 0o444, "can be read by others (mode 444)"),
    "root's, which a group may write": (ME, 0, 0o660, "can be read by others (mode 660)"),
    "another user's, for everybody, as root": (0, OTHER, 0o644, "can be read by others (mode 644)"),
}


@as_root
@pytest.mark.parametrize(("user", "owner", "mode"), ACCEPTED.values(), ids=ACCEPTED.keys())
def test_a_file_that_nobody_else_knows_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: int, owner: int, mode: int
) -> None:
    monkeypatch.setattr(secret.os, "getuid", lambda: user)
    assert load_token(token_file(tmp_path, owner, mode), required=True) == TOKEN


@as_root
@pytest.mark.parametrize(("user", "owner", "mode", "problem"), REFUSED.values(), ids=REFUSED.keys())
def test_a_file_that_others_know_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: int, owner: int, mode: int, problem: str
) -> None:
    monkeypatch.setattr(secret.os, "getuid", lambda: user)
    with pytest.raises(TokenError) as told:
        load_token(token_file(tmp_path, owner, mode), required=True)
    assert told.value.message.endswith(problem)


def test_the_output_of_a_process_may_be_the_file(tmp_path: Path) -> None:
    """As in `SLIPWAY_TOKEN_FILE=<(vault read …)`."""
    reader, writer = os.pipe()
    os.write(writer, TOKEN.encode())
    os.close(writer)
    try:
        assert load_token({"SLIPWAY_TOKEN_FILE": f"/dev/fd/{reader}"}, required=True) == TOKEN
    finally:
        os.close(reader)
