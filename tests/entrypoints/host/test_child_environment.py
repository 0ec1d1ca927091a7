import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from entrypoints.errors import UsageError
from entrypoints.host.child_environment import CACHES, child_environment, without_launchers
from entrypoints.host.network.fabric_settings import Setting
from entrypoints.host.proxies import past_proxies


def test_a_writable_home_is_used_as_it_is(tmp_path: Path) -> None:
    environment = child_environment({"HOME": str(tmp_path), "A": "b"})
    assert environment["A"] == "b"
    assert environment["HOME"] == str(tmp_path)
    assert not set(CACHES) & set(environment)


@pytest.mark.parametrize("home", ["/", "", "/no/such/place", None])
def test_without_a_home_everything_goes_below_the_cache_directory(tmp_path: Path, home: str | None) -> None:
    given = {"SLIPWAY_CACHE_DIR": str(tmp_path / "cache"), "HF_HOME": "/models"}
    environment = child_environment(given if home is None else {**given, "HOME": home})
    assert environment["HF_HOME"] == "/models"
    assert environment["TRITON_CACHE_DIR"] == str(tmp_path / "cache" / "triton")
    assert Path(environment["HOME"]).is_dir()
    assert os.access(environment["HOME"], os.W_OK)


def test_children_do_not_get_the_secret(tmp_path: Path) -> None:
    given = {"HOME": str(tmp_path), "SLIPWAY_TOKEN": "s", "SLIPWAY_TOKEN_FILE": "f", "SLIPWAY_LOG_DIR": "a"}
    assert child_environment(given) == {"HOME": str(tmp_path), "SLIPWAY_LOG_DIR": "a"}


def test_a_cache_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot create .*/file/cache"):
        child_environment({"SLIPWAY_CACHE_DIR": str(tmp_path / "file" / "cache")})


@pytest.fixture
def uid(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A user id whose folder below /tmp no other program uses."""
    number = 900_000_000 + os.getpid()
    place = Path(f"/tmp/slipway-{number}")
    real = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: number)
    monkeypatch.setattr(Path, "lstat", lambda path: own(os.lstat(path), real, number))
    yield number
    if place.is_symlink():
        place.unlink()
    elif place.exists():
        shutil.rmtree(place)


def own(status: os.stat_result, real: int, number: int) -> os.stat_result:
    """The status as the kernel shows it to a user whose files these are."""
    fields = list(status)
    fields[4] = number if fields[4] == real else fields[4]
    return os.stat_result(fields)


def test_the_folder_below_tmp_is_for_its_user_alone(uid: int) -> None:
    child_environment({})
    assert stat.S_IMODE(os.lstat(f"/tmp/slipway-{uid}").st_mode) == 0o700
    assert child_environment({})["HOME"] == f"/tmp/slipway-{uid}/home"


@pytest.mark.parametrize("target", ["a folder", "nothing"])
def test_a_link_in_the_place_of_the_folder_below_tmp_is_refused(uid: int, tmp_path: Path, target: str) -> None:
    Path(f"/tmp/slipway-{uid}").symlink_to(tmp_path if target == "a folder" else tmp_path / "none")
    with pytest.raises(UsageError, match=f"/tmp/slipway-{uid} is a link"):
        child_environment({})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o1777])
def test_a_folder_below_tmp_that_others_can_write_is_refused(uid: int, mode: int) -> None:
    Path(f"/tmp/slipway-{uid}").mkdir()
    Path(f"/tmp/slipway-{uid}").chmod(mode)
    with pytest.raises(UsageError, match="can be written by others") as told:
        child_environment({})
    assert told.value.hint.startswith("remove it, or set SLIPWAY_CACHE_DIR")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_another_users_folder_below_tmp_is_refused(uid: int) -> None:
    Path(f"/tmp/slipway-{uid}").mkdir()
    os.chown(f"/tmp/slipway-{uid}", 4711, 4711)
    with pytest.raises(UsageError, match="belongs to another user \\(uid 4711\\)"):
        child_environment({})


def test_a_folder_that_the_user_chose_may_be_a_groups(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    given = {"SLIPWAY_CACHE_DIR": str(tmp_path / "cache")}
    assert child_environment(given)["TRITON_CACHE_DIR"] == str(tmp_path / "cache" / "triton")


def test_the_hosts_settings_yield_to_the_users(tmp_path: Path) -> None:
    settings = [Setting("TOKENIZERS_PARALLELISM", "false", "r"), Setting("NCCL_X", "1", "r")]
    environment = child_environment({"HOME": str(tmp_path), "NCCL_X": "0"}, settings)
    assert environment == {"HOME": str(tmp_path), "TOKENIZERS_PARALLELISM": "false", "NCCL_X": "0"}


def test_ray_does_not_see_the_launcher_above() -> None:
    variables = dict.fromkeys(
        ["SLURM_JOB_ID", "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "PATH", "NCCL_DEBUG"], ""
    )
    assert set(without_launchers(variables)) == {"PATH", "NCCL_DEBUG"}


def test_the_jobs_own_traffic_does_not_go_through_the_users_proxy(tmp_path: Path) -> None:
    given = {"HOME": str(tmp_path), "http_proxy": "http://proxy:3128"}
    environment = child_environment(given)
    assert environment["no_proxy"] == environment["NO_PROXY"] == "localhost,127.0.0.1,::1"


@pytest.mark.parametrize("proxy", ["http_proxy", "HTTPS_PROXY", "all_proxy"])
def test_the_users_exceptions_from_a_proxy_are_kept_in_either_spelling(proxy: str) -> None:
    given = {proxy: "http://proxy:3128", "no_proxy": "a.com, 10.0.0.0/8", "NO_PROXY": "b.com,localhost"}
    exceptions = "a.com,10.0.0.0/8,b.com,localhost,127.0.0.1,::1,10.1.0.1,fd00::2"
    assert past_proxies(given, ["10.1.0.1", "fd00::2"]) == {"no_proxy": exceptions, "NO_PROXY": exceptions}


@pytest.mark.parametrize("given", [{}, {"http_proxy": ""}, {"http_proxy": "http://proxy", "NO_PROXY": "*"}])
def test_without_a_proxy_nothing_is_set(given: dict[str, str]) -> None:
    assert past_proxies(given, ["10.1.0.1"]) == {}
