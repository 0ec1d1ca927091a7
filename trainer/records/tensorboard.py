"""TensorBoard's event files. Events that cannot be written wait in memory."""

import os
import socket
import time
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from trainer.records.files.lines import RecordFile


class TensorBoardFile:
    """The event file of a run's process."""

    def __init__(self, directory: Path, resumed_step: int | None) -> None:
        """With `resumed_step` TensorBoard hides what earlier processes wrote about later steps."""
        directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = RecordFile(directory / name)
        self._file.append(_record(Event(wall_time=time.time(), file_version="brain.Event:2")))
        if resumed_step is not None:
            start = SessionLog(status=SessionLog.START)
            self._file.append(_record(Event(wall_time=time.time(), step=resumed_step + 1, session_log=start)))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._file.append(_record(Event(wall_time=time.time(), step=step, summary=Summary(value=values))))

    def close(self) -> None:
        self._file.close()


def _record(event: Event) -> bytes:
    """An event as the file holds it, with length and checksums."""
    buffer = BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()
