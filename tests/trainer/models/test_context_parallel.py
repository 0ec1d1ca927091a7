"""Rows that several ranks compute together, compared with one process."""

import re
from pathlib import Path

import pytest
import torch

from tests.trainer.models import context_program
from tests.trainer.models.context_program import CASES, Found
from tests.trainer.models.test_log_probs_by_family import language_model
from tests.trainer.training.ranks import run_ranks
from trainer.errors import DataError
from trainer.models.networks import check_context_parallel

PROGRAM = Path(context_program.__file__)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, tuple[Found, Found]]]:
    directory = tmp_path_factory.mktemp("context")
    for world_size in CASES:
        run_ranks(PROGRAM, world_size, directory)
    return {size: torch.load(directory / f"found_{size}.pt") for size in CASES}


@pytest.mark.parametrize(("world_size", "case"), [(size, case) for size, cases in CASES.items() for case in cases])
def test_ranks_that_share_rows_compute_what_one_does(
    results: dict[int, dict[str, tuple[Found, Found]]], world_size: int, case: str
) -> None:
    alone, together = results[world_size][case]
    if case == "Megatron":  # whose layers name their weights otherwise
        together = {name: tensor for name, tensor in together.items() if ".megatron." not in name}
        alone = {name: tensor for name, tensor in alone.items() if ".layers." not in name}
    assert together.keys() == alone.keys()
    assert {name.split()[0] for name in alone} >= {"log-probs", "entropy", "squares", "policy:"}
    for name, tensor in alone.items():
        difference = float((together[name] - tensor).norm()) / max(float(tensor.norm()), 1e-3)
        assert difference < 1e-5, f"{name}: {difference}"
        assert tensor.any() or "bias" in name, f"{name} shows nothing"


@pytest.mark.parametrize(
    ("family", "ranks", "split", "reason"),
    [
        ("qwen3", 3, 1, "have 4 attention heads, which it does not divide.*set it to one of 1, 2, 4"),
        ("qwen3", 4, 2, "have 2 attention heads on each of sharding.tensor_parallel=2.*set it to one of 1, 2$"),
        ("mamba", 2, 1, "mamba models cannot be computed by several ranks together.*a recurrent state.*set it to 1"),
        ("lfm2", 2, 1, "it has layers of the kind conv"),
    ],
)
def test_models_that_ranks_cannot_share_are_refused(family: str, ranks: int, split: int, reason: str) -> None:
    with torch.device("meta"):
        model = language_model(family)
    with pytest.raises(DataError, match=f"critic.sharding.context_parallel={ranks}: {family}") as refused:
        check_context_parallel(model, "critic", ranks, split)
    assert re.search(reason, f"{refused.value} {refused.value.hint}")
    check_context_parallel(model, "critic", 1, split)


def test_members_may_outnumber_key_value_heads_or_not_divide_them() -> None:
    model = language_model("qwen3", {"num_attention_heads": 12, "num_key_value_heads": 4})
    for ranks in (1, 2, 3, 4, 6, 12):
        check_context_parallel(model, "critic", ranks)
