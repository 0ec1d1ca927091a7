"""A gradient that is not finite: the parameter, the rows and the tokens behind it are named and kept."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.trainer.models.test_log_probs_by_family import TEMPERATURE, language_model, rows
from trainer.algorithms.losses.aggregation import GlobalCount, aggregate
from trainer.data.batches.batch import Batch
from trainer.data.batches.partition import MicroBatchLimit
from trainer.errors import WorkerError
from trainer.models.networks import PolicyNetwork
from trainer.models.small import build_tokenizer
from trainer.training.engine import OptimizerSettings, TrainingEngine
from trainer.training.non_finite import FaultFiles, KeptFaults, non_finite_tokens
from trainer.training.ranks.sharding import Execution

LIMIT = MicroBatchLimit(2, None)


pytestmark = pytest.mark.usefixtures("one_rank")


def engine(faults: FaultFiles, skip: bool = False) -> TrainingEngine:
    settings = OptimizerSettings(1e-3, 0.0, 1.0, skip_non_finite=skip)
    made = TrainingEngine(
        PolicyNetwork(language_model("qwen2"), TEMPERATURE), Execution(torch.device("cpu"), torch.float32), settings
    )
    made.faults = faults
    return made


def loss(output: tuple[Tensor, Tensor], batch: Batch, count: GlobalCount) -> tuple[Tensor, dict[str, Tensor]]:
    value = aggregate(-output[0] * batch.advantages, batch.response_mask, "token-mean", count)
    return value, {"loss": value}


def batch_with(row: int | None = None, token: int = 0) -> Batch:
    advantages = torch.ones(rows().response_mask.shape)
    if row is not None:
        advantages[row, token] = float("nan")
    return rows().with_(advantages=advantages)


@pytest.fixture
def files(tmp_path: Path) -> FaultFiles:
    build_tokenizer(["some text of a prompt and its response"]).save_pretrained(tmp_path / "model")
    return FaultFiles(tmp_path / "non_finite", "actor", tmp_path / "model")


def test_a_planted_nan_is_found_in_its_row_and_token_and_kept(files: FaultFiles) -> None:
    with pytest.raises(WorkerError, match=r"advantages of row 3 on rank 0 is not finite at token 7; see ") as caught:
        engine(files).update(batch_with(3, 7), loss, LIMIT)
    path = files.directory / "actor_update_000001.json"
    assert str(path) in str(caught.value)
    report = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert report["rows"][0]["non_finite_tokens"] == {"advantages": [7]}
    assert report["weights"] == {"count": 0, "first": []}
    assert report["gradients"]["first"][0] == "language_model.lm_head.weight"  # the one next to the loss
    assert {"prompt", "response"} <= report["rows"][0].keys()
    tensors = load_file(path.with_suffix(".safetensors"))
    assert tensors["0.advantages"].isnan().nonzero().tolist() == [[7]]
    assert tensors["0.token_ids"].equal(batch_with().rows(torch.tensor([3])).token_ids[0])
    assert tensors["0.output"].isfinite().all()


def test_a_weight_that_is_not_finite_is_named(files: FaultFiles) -> None:
    broken = engine(files)
    name, weight = next(
        (name, parameter) for name, parameter in broken.network.named_parameters() if "layers.1.mlp.up" in name
    )
    with torch.no_grad():
        weight.to_local()[0, 0] = float("inf")
    with pytest.raises(WorkerError, match=rf"1 weights are not finite, the first is {name}; output of row 0 "):
        broken.update(batch_with(), loss, LIMIT)


def test_a_skipped_step_is_kept_as_well_and_training_goes_on(files: FaultFiles) -> None:
    trained, kept = engine(files, skip=True), KeptFaults(files.directory)
    assert trained.update(batch_with(1, 1), loss, LIMIT)["skipped"] == 1
    ((path, cause),) = kept.new()
    assert path == files.directory / "actor_update_000001.json"
    assert "advantages of row 1 on rank 0 is not finite at token 1" in cause
    assert kept.new() == []
    assert trained.update(batch_with(), loss, LIMIT)["skipped"] == 0


def test_every_fault_of_an_update_is_kept(files: FaultFiles) -> None:
    trained, kept = engine(files, skip=True), KeptFaults(files.directory)
    for row in (1, 3):  # two mini-batches
        assert trained.update(batch_with(row, 1), loss, LIMIT)["skipped"] == 1
    (first, cause), (second, other) = kept.new()
    assert [first.name, second.name] == ["actor_update_000001.json", "actor_update_000001_2.json"]
    assert "row 1 on rank 0" in cause
    assert "row 3 on rank 0" in other
    assert load_file(first.with_suffix(".safetensors"))["0.advantages"].isnan().any()
    with trained.updating():
        trained.update(batch_with(1, 1), loss, LIMIT)
    trained.update(batch_with(1, 1), loss, LIMIT)
    assert (files.directory / "actor_update_000002.json").exists()


def test_masked_tokens_are_no_fault() -> None:
    batch = batch_with(2, 9)  # its response has one token
    assert not batch.response_mask[2, 9]
    assert non_finite_tokens(batch, torch.zeros(batch.response_mask.shape)) == {}
