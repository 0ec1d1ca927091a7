"""Records beside the training: a slow disk costs no step, and nothing is lost at the end."""

import threading
from functools import partial
from pathlib import Path

import pytest

from trainer.config.tree import Config
from trainer.records.files import record_thread
from trainer.records.files.lines import RecordFile
from trainer.records.files.record_thread import RecordThread
from trainer.records.tracking import Tracker

PATIENCE = 60.0


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A disk that writes no record until the event is set."""
    ready = threading.Event()
    write = RecordFile.append

    def wait_and_write(file: RecordFile, record: bytes) -> None:
        assert ready.wait(PATIENCE)
        write(file, record)

    monkeypatch.setattr(RecordFile, "append", wait_and_write)
    return ready


def test_steps_go_on_while_the_disk_does_not(tmp_path: Path, disk: threading.Event) -> None:
    disk.set()
    with Tracker(tmp_path, Config()) as tracker:
        tracker.begin()
        disk.clear()
        for step in range(1, 4):
            with tracker.phase("generate"):
                pass
            tracker.log(step, {"reward/mean": 0.5})
        assert not (tmp_path / "metrics.jsonl").read_text()
        disk.set()
        tracker.flush()
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_records_are_written_in_their_order_before_the_end() -> None:
    written: list[int] = []
    thread = RecordThread("records")
    for number in range(100):
        thread.put(partial(written.append, number))
    thread.close()
    assert written == list(range(100))


def test_an_error_of_a_write_reaches_the_run() -> None:
    thread = RecordThread("records")
    thread.put(partial(int, "no number"))
    with pytest.raises(ValueError, match="no number"):
        thread.close()


@pytest.mark.parametrize(("limit", "value", "size"), [("MOST_WAITING", 2, 0), ("MOST_BYTES", 20, 10)])
def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch, limit: str, value: int, size: int) -> None:
    monkeypatch.setattr(record_thread, limit, value)
    disk, put = threading.Event(), threading.Semaphore(0)
    thread = RecordThread("records")

    def put_all() -> None:
        for _ in range(3):
            thread.put(lambda: disk.wait(PATIENCE) and None, size)
            put.release()

    putting = threading.Thread(target=put_all)
    putting.start()
    assert put.acquire(timeout=PATIENCE)
    assert put.acquire(timeout=PATIENCE)
    assert not put.acquire(timeout=0.2)  # the third waits
    disk.set()
    assert put.acquire(timeout=PATIENCE)
    putting.join()
    thread.close()


def test_a_record_larger_than_the_bound_is_written_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_thread, "MOST_BYTES", 1)
    thread = RecordThread("records")
    written: list[int] = []
    for number in range(3):
        thread.put(partial(written.append, number), 10)
    thread.close()
    assert written == [0, 1, 2]
