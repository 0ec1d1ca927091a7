"""Whole runs that repeat the experts of another pass, and settings that cannot."""

from pathlib import Path

import pytest

from tests.trainer.models.expert_families import write_experts_model
from tests.trainer.whole_run import Runs
from trainer.compat.settings import load_config
from trainer.errors import ConfigError, DataError
from trainer.models.files import check_models
from trainer.rollout.engine import EngineRow, check_engine


@pytest.fixture(scope="module")
def with_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_experts_model(tmp_path_factory.mktemp("experts") / "model")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("recompute", ["actor.router_replay=recompute", "actor.router_aux_loss=0.1", "actor.router_z_loss=0.01"]),
        ("engine", ["actor.router_replay=engine"]),
    ],
)
def test_a_run_repeats_experts_over_several_optimizer_steps(
    runs: Runs, with_experts: Path, name: str, settings: list[str]
) -> None:
    run = runs.start(
        f"replay-{name}",
        f"model.path={with_experts}",
        "rollout.engine=transformers",
        "algorithm.advantage=grpo",
        "trainer.total_steps=2",
        *settings,
    )
    run.succeed()
    rows = run.metrics()[1:]
    assert len(rows) == 2
    for row in rows:
        assert row["rollout/log_prob_difference"] < 1e-4
        assert row["actor/expert_load_max"] >= row["actor/expert_load"] >= 1
        assert row.get("rollout/unrecorded_routes") == (0.0 if name == "engine" else None)
        assert ("actor/router_aux_loss" in row) == ("actor/router_z_loss" in row) == (name == "recompute")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            ["actor.router_replay=recompute", "algorithm.old_log_probs=engine"],
            "recompute: no pass for old log-probs records experts .*set actor.router_replay=engine",
        ),
        (
            ["actor.router_replay=engine", "trainer.mode=one_step_off", "algorithm.correction=tis"],
            "does not support trainer.mode=one_step_off: .* set actor.router_replay=recompute",
        ),
    ],
)
def test_experts_that_nothing_records_are_refused(settings: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config([], settings)


def test_an_engine_that_records_no_experts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"other": EngineRow(lambda *_: None, package="torch", preference=9)}  # type: ignore[arg-type,return-value]
    monkeypatch.setattr("trainer.rollout.engine.engine_rows", lambda: rows)
    check_engine(load_config([], ["actor.router_replay=recompute"])[0])
    with pytest.raises(ConfigError, match="router_replay=engine: an engine of other does not record experts"):
        check_engine(load_config([], ["actor.router_replay=engine"])[0])


@pytest.mark.parametrize("setting", ["router_replay=recompute", "router_aux_loss=0.1", "router_z_loss=0.1"])
def test_a_model_without_experts_is_refused_before_the_start(runs: Runs, setting: str) -> None:
    config = load_config([], [f"model.path={runs.model}", f"actor.{setting}", "data.max_response_length=16"])[0]
    with pytest.raises(DataError, match=f"^actor.{setting}: qwen2 models have no experts"):
        check_models(config)
