"""Experts that ranks divide, compared with plain Transformers in one process."""

import subprocess
import sys
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from tests.trainer.models import expert_program
from tests.trainer.models.expert_program import CASES, DECAY, EPSILON, MOST_NORM, RATE, UPDATES, Found, Model, rows
from tests.trainer.models.test_log_probs_by_family import one_by_one
from tests.trainer.training.rank_program import loss
from tests.trainer.training.ranks import REPOSITORY
from trainer.algorithms.losses.aggregation import GlobalCount

ALL = [(size, case) for size, cases in CASES.items() for case in cases]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Found]]:
    directory = tmp_path_factory.mktemp("experts")
    program = [sys.executable, expert_program.__file__, str(directory)]
    subprocess.run(program, check=True, timeout=240, cwd=REPOSITORY, env={"PYTHONPATH": str(REPOSITORY)})
    return {size: torch.load(directory / f"world_{size}.pt", weights_only=False) for size in CASES}


@cache
def plain(model: Model) -> Found:
    """What `expert_program.found` returns, by Transformers' own forward pass on each row alone and by torch's AdamW."""
    network, batch = model.make(), rows()
    trained = {name: weight for name, weight in network.named_parameters() if weight.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), RATE, weight_decay=DECAY, eps=EPSILON)
    count = GlobalCount(int(batch.response_mask.sum()), len(batch))
    updates: list[dict[str, float]] = []
    result: Found = {}
    for _ in range(UPDATES):
        outputs = one_by_one(network, batch)
        value, metrics = loss(outputs, batch, count)
        optimizer.zero_grad()
        value.backward()
        found = {name: float(metric) for name, metric in metrics.items()}
        result = result or {
            "log_probs": outputs[0].detach().clone(),
            "gradients": {name: weight.grad.clone() for name, weight in trained.items() if weight.grad is not None},
            "metrics": found,
        }
        norm = nn.utils.clip_grad_norm_(trained.values(), MOST_NORM)
        updates.append({**found, "gradient_norm": float(norm), "skipped": 0.0})
        optimizer.step()
    weights = {name: weight.detach() for name, weight in network.named_parameters()}
    return {**result, "updates": updates, "weights": weights}


def apart(computed: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """The largest differences: of log-probs, and relative ones of gradients, metrics and weights."""
    assert computed["gradients"].keys() == expected["gradients"].keys()
    assert len(computed["updates"]) == len(expected["updates"])
    numbers = [(computed["metrics"], expected["metrics"]), *zip(computed["updates"], expected["updates"], strict=True)]
    tensors = {
        kind: [(computed[kind][name], tensor) for name, tensor in expected[kind].items()]
        for kind in ("gradients", "weights")
    }
    return {
        "log_probs": float((computed["log_probs"] - expected["log_probs"]).abs().max()),
        "metrics": max(abs(a[name] - b[name]) / max(abs(b[name]), 1e-3) for a, b in numbers for name in b),
        **{
            kind: max(float((a - b).norm()) / max(float(b.norm()), 1e-3) for a, b in pairs)
            for kind, pairs in tensors.items()
        },
    }


@pytest.mark.parametrize(("ranks", "case"), ALL, ids=lambda value: getattr(value, "name", str(value)))
def test_ranks_that_divide_experts_train_as_plain_transformers_does(
    results: dict[int, dict[str, Found]], ranks: int, case: Any
) -> None:
    expected = plain(case.model)
    differences = apart(results[ranks][case.name], expected)
    print(ranks, case.name, {k: f"{v:.1e}" for k, v in differences.items()})
    assert max(differences.values()) < 1e-5, differences
    assert expected["log_probs"].abs().max() > 1
