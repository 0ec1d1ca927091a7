"""Checkpoints from elsewhere: they are read, but what they name is not run."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as distributed_checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from trainer.training.ranks.reading import load_safely, read_metadata

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


# torch wraps what a rank raises.
REFUSED = (pickle.UnpicklingError, distributed_checkpoint.CheckpointException)


class Planted:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def state(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    network = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(network.parameters(), lr=seed / 10)
    network(torch.ones(4)).sum().backward()
    optimizer.step()
    weights, states = get_state_dict(network, optimizer)
    return {"network": weights, "optimizer": states, "updates": torch.tensor(seed), "half": torch.ones(2).bfloat16()}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    distributed_checkpoint.save(state(1), checkpoint_id=tmp_path / "actor")
    return tmp_path / "actor"


def test_a_checkpoint_is_read_to_the_bit(checkpoint: Path) -> None:
    loaded, expected = state(2), state(1)
    load_safely(loaded, checkpoint)
    for name in ("weight", "bias"):
        assert torch.equal(loaded["network"][name], expected["network"][name])
        assert torch.equal(
            loaded["optimizer"]["state"][name]["exp_avg"], expected["optimizer"]["state"][name]["exp_avg"]
        )
    assert loaded["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    assert int(loaded["updates"]) == 1
    assert "network.weight" in read_metadata(checkpoint).state_dict_metadata


def test_code_in_the_metadata_is_not_run(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Planted(tmp_path / "planted")))
    with pytest.raises(REFUSED, match=r"it names \w+\.mkdir, which no checkpoint needs"):
        load_safely(state(2), checkpoint)
    assert not (tmp_path / "planted").exists()


def test_code_in_a_value_is_not_run(tmp_path: Path) -> None:
    distributed_checkpoint.save({"rate": Planted(tmp_path / "planted")}, checkpoint_id=tmp_path / "actor")
    with pytest.raises(REFUSED, match="mkdir"):
        load_safely({"rate": 0.1}, tmp_path / "actor")
    assert not (tmp_path / "planted").exists()


def test_getattr_reaches_nothing_but_memory_formats(checkpoint: Path, tmp_path: Path) -> None:
    class Attribute:
        def __reduce__(self) -> tuple[Any, ...]:
            return getattr, (torch.Size, "__subclasses__")

    (checkpoint / ".metadata").write_bytes(pickle.dumps(Attribute()))
    with pytest.raises(pickle.UnpicklingError, match="it reads __subclasses__"):
        read_metadata(checkpoint)


def test_files_outside_the_checkpoint_are_not_read(checkpoint: Path) -> None:
    metadata = read_metadata(checkpoint)
    for place in metadata.storage_data.values():
        place.relative_path = "../../etc/passwd"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(REFUSED, match="it names a file elsewhere"):
        load_safely(state(2), checkpoint)
