"""The training roles as the controller calls them. The classes in `trainer.roles` implement these interfaces.

Calls name a method of an interface, so that the type checker compares arguments and result, and the controller need
not import the classes, which load a model's code.
"""

from pathlib import Path
from typing import Protocol

from torch import Tensor

from trainer.data.batch import Batch
from trainer.weights.endpoints import WeightSender


class TrainingRole(Protocol):
    """A rank that holds a network."""

    def open_store(self) -> int: ...
    def setup(self, store_address: str, store_port: int, run_dir: Path, run_steps: int) -> list[str]: ...
    def start_trace(self) -> None: ...
    def stop_trace(self, directory: Path, step: int, role: str) -> None: ...


class TrainedRole(TrainingRole, Protocol):
    """A rank whose network takes optimizer steps and belongs in checkpoints."""

    def update(self, batch: Batch) -> dict[str, float]: ...
    def start_save(self, directory: Path) -> None: ...
    def saving(self) -> bool: ...
    def finish_save(self, seconds: float) -> dict[str, str] | None: ...
    def load(self, directory: Path) -> None: ...


class ReferenceRole(TrainingRole, Protocol):
    def reference_log_probs(self, batch: Batch) -> Tensor: ...


class ActorRole(TrainedRole, ReferenceRole, WeightSender, Protocol):
    def log_probs(self, batch: Batch) -> Tensor: ...
    def export(self, directory: Path) -> None: ...


class CriticRole(TrainedRole, Protocol):
    def values(self, batch: Batch) -> Tensor: ...
