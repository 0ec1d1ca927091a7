"""Nodes that meet through a folder that they share."""

import json
import socket
import time
from pathlib import Path

import pytest

from entrypoints.environments import detect
from entrypoints.host.tree import Tree
from entrypoints.wire.job_directory import shared_home
from entrypoints.wire.rendezvous import HeadNote, leave, meeting_place
from tests.entrypoints.conftest import Launch, Start
from tests.entrypoints.wire.test_reach import dropping
from tests.serving import free_port


def start_mpi_task(start: Start, rank: int, directory: Path, *arguments: str) -> Launch:
    """Start a task of Hydra, which has neither head nor token."""
    numbers = {"PMI_RANK": str(rank), "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    return start("--no-ray", *arguments, **numbers, SLIPWAY_JOB_DIR=str(directory))


def test_a_shared_directory_serves_as_meeting_place_without_token_or_head(start: Start, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = ("--control-port", str(probe.getsockname()[1]))
    worker = start_mpi_task(start, 1, tmp_path, *port, "--", "true")
    head = start_mpi_task(start, 0, tmp_path, *port, "--", "sh", "-c", "stat -c %a slipway-*.json; exit 5")
    ended = head.wait()
    assert (ended.status, worker.wait().status) == (5, 5), ended.stderr
    assert ended.stdout == "600\n"
    assert not list(tmp_path.glob("slipway-*.json"))


def test_the_note_of_a_dead_head_is_not_believed(start: Start, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = ("--control-port", str(probe.getsockname()[1]))
    old = tmp_path / f"slipway-hydra-{port[1]}.json"
    old.write_text(json.dumps({"token": "of the dead head", "heads": ["127.0.0.1"], "written": time.time()}))
    old.chmod(0o600)
    worker = start_mpi_task(start, 1, tmp_path, *port, "--", "true")
    while "the note's head has not proved itself: 127.0.0.1" not in (line := worker.read_error()):
        assert line, "launch ended"
    head = start_mpi_task(start, 0, tmp_path, *port, "--", "sh", "-c", "exit 5")
    ended = head.wait()
    assert (ended.status, worker.wait().status) == (5, 5), ended.stderr
    assert not list(tmp_path.glob("slipway-*.json"))


def test_a_note_without_a_living_head_is_an_error_at_the_deadline(start: Start, tmp_path: Path) -> None:
    # The port belongs to a stranger, which reads everything and proves nothing.
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = str(stranger.getsockname()[1])
        note = tmp_path / f"slipway-hydra-{port}.json"
        note.write_text('{"token": "of the dead head", "heads": ["127.0.0.1"]}')
        note.chmod(0o600)
        worker = start_mpi_task(start, 1, tmp_path, "--deadline", "1", "--control-port", port, "--", "true")
        connection, _ = stranger.accept()
        connection.close()
        stranger.close()
        ended = worker.wait()
    assert ended.status == 12
    assert f"the head of the note {note} did not prove itself within 1 s: " in ended.stderr


def test_a_note_whose_first_address_drops_packets_leads_to_the_head(start: Start, tmp_path: Path) -> None:
    port, token = free_port(), "the token of the note"
    note = tmp_path / f"slipway-hydra-{port}.json"
    note.touch(mode=0o600)
    note.write_text(json.dumps({"token": token, "heads": ["127.0.0.2", "127.0.0.1"]}))
    with dropping("127.0.0.2", port):
        worker = start_mpi_task(start, 1, tmp_path, "--control-port", str(port), "--", "true")
        numbers = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
        told = {"SLIPWAY_HEAD": "127.0.0.1", "SLIPWAY_TOKEN": token, "SLIPWAY_CONTROL_PORT": str(port)}
        head = start("--no-ray", "--", "sh", "-c", "exit 5", **numbers, **told)
        assert (head.wait().status, worker.wait().status) == (5, 5)


JOB = {"SLURM_JOB_ID": "5"}
MOUNTS = """21 1 8:1 / / rw - ext4 /dev/sda1 rw
22 21 0:40 / {home} rw - {kind} server:/home rw
23 22 8:2 / {home}/scratch rw - xfs /dev/sdb1 rw
"""


@pytest.mark.parametrize(
    ("variables", "home", "kind", "serves"),
    [
        (JOB, "", "nfs4", True),
        (JOB, "/ann", "lustre", True),
        (JOB, "", "ext4", False),
        (JOB, "/scratch", "nfs4", False),
        ({}, "", "nfs4", False),  # no job id
        ({"JOB_ID": "5", "PE": "mpi"}, "", "gpfs", True),
    ],
)
def test_a_home_on_the_network_serves_a_schedulers_job_as_meeting_place(
    tmp_path: Path, variables: dict[str, str], home: str, kind: str, serves: bool
) -> None:
    place = Path(f"{tmp_path}/home{home}")
    place.mkdir(parents=True)
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "mountinfo").write_text(MOUNTS.format(home=tmp_path / "home", kind=kind))
    folder = shared_home({**variables, "HOME": str(place)}, Tree(tmp_path))
    assert folder == (place / ".slipway" if serves else None)


def test_the_folder_in_a_shared_home_is_private(tmp_path: Path) -> None:
    alone = detect({"SLIPWAY_SINGLE": "1"}, "me").allocation
    with meeting_place(tmp_path / ".slipway", alone, None, 1.0, 20_000, "me"):
        assert (tmp_path / ".slipway").stat().st_mode & 0o777 == 0o700
        assert len(list((tmp_path / ".slipway").glob("slipway-*.json"))) == 1
    assert not list((tmp_path / ".slipway").iterdir())


def test_the_note_of_the_jobs_next_start_stays(tmp_path: Path) -> None:
    alone = detect({"SLIPWAY_SINGLE": "1"}, "me").allocation
    with meeting_place(tmp_path, alone, None, 1.0, 20_000, "me"):
        newer = leave(tmp_path, alone.job_id, 20_000, HeadNote("the next token", ("10.0.0.2",)))
    assert newer.exists()


def test_jobs_of_the_same_hosts_on_ports_of_their_own_have_notes_of_their_own(tmp_path: Path) -> None:
    head = detect({"SLIPWAY_HOSTS": "me,other"}, "me").allocation
    with (
        meeting_place(tmp_path, head, None, 1.0, 20_000, "me") as (_, first),
        meeting_place(tmp_path, head, None, 1.0, 20_001, "me") as (_, second),
    ):
        tokens = {json.loads(note.read_text(encoding="utf-8"))["token"] for note in tmp_path.glob("slipway-*.json")}
        assert tokens == {first, second}


def test_a_missing_note_is_an_error_at_the_deadline(start: Start, tmp_path: Path) -> None:
    ended = start_mpi_task(start, 1, tmp_path, "--deadline", "1", "--control-port", "20000", "--", "true").wait()
    assert ended.status == 12
    assert f"the head left no note {tmp_path}/slipway-hydra-20000.json within 1 s" in ended.stderr


def test_a_note_that_others_can_read_is_refused(start: Start, tmp_path: Path) -> None:
    (tmp_path / "slipway-hydra-20000.json").write_text("{}", encoding="ascii")
    ended = start_mpi_task(start, 1, tmp_path, "--control-port", "20000", "--", "true").wait()
    assert ended.status == 11
    assert "others can read or own " in ended.stderr


def test_an_unwritable_job_directory_is_an_error(start: Start) -> None:
    ended = start_mpi_task(start, 0, Path("/proc"), "--", "true").wait()
    assert ended.status == 11
    assert "SLIPWAY_JOB_DIR=/proc cannot be written" in ended.stderr
