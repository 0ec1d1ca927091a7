from pathlib import Path

import pytest

from buildkit.errors import RunError
from buildkit.run import RunRequest, check_volumes, default_shm_bytes


def test_volumes_get_absolute_host_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert check_volumes(("runs:/runs:ro",)) == (f"{tmp_path}/runs:/runs:ro",)


@pytest.mark.parametrize("volume", ["/no/such/folder:/data", "/tmp", "missing:/x"])
def test_a_volume_that_cannot_be_mounted_is_refused(volume: str) -> None:
    with pytest.raises(RunError) as caught:
        check_volumes((volume,))
    assert volume in str(caught.value)


def test_shared_memory_is_never_dockers_64_mb() -> None:
    assert default_shm_bytes(nodes=8) > 2**30
    assert default_shm_bytes(nodes=1) > default_shm_bytes(nodes=8)


def test_every_job_has_a_name_and_a_secret_of_its_own() -> None:
    one, other = (RunRequest("image", "cpu", ("true",)) for _ in range(2))
    assert one.name != other.name
    assert one.token != other.token
    assert one.token not in repr(one)
