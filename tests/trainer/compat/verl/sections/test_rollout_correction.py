"""verl's rollout correction: the same weights, the same rejection, and bypass mode."""

from typing import Any

import pytest

from trainer.compat.settings import load_config
from trainer.config.tree import Config
from trainer.errors import ConfigError

SECTION = "algorithm.rollout_correction"


def corrected(*line: str) -> tuple[Config, list[str]]:
    return load_config(["verl"], [f"{SECTION}.{part}" for part in line])


@pytest.mark.parametrize(
    ("line", "correction", "bounds"),
    [
        (["rollout_is=null"], "none", (0.5, 2.0)),
        (["rollout_is=token"], "tis", (0.5, 2.0)),
        (["rollout_is=token", "rollout_is_threshold=5.0"], "tis", (0.5, 5.0)),
        (["rollout_is=sequence", "rollout_is_threshold=5.0"], "sequence_tis", (0.5, 5.0)),
        (["rollout_is=token", "rollout_is_threshold='0.25_4.0'"], "icepop", (0.25, 4.0)),
        (["rollout_is_threshold='0.25_4.0'", "rollout_is=sequence"], "sequence_icepop", (0.25, 4.0)),
        (["rollout_is=token", "rollout_is_threshold=null"], "none", (0.5, 2.0)),
    ],
)
def test_weights(line: list[str], correction: str, bounds: tuple[float, float]) -> None:
    algorithm = corrected(*line)[0].algorithm.model_dump()
    assert algorithm["correction"] == correction
    assert (algorithm["correction_low"], algorithm["correction_high"]) == bounds


@pytest.mark.parametrize(
    ("line", "rejection"),
    [
        (["rollout_rs=null"], {}),
        (["rollout_rs=seq_mean_k1", "rollout_rs_threshold='0.8_1.25'"], {"seq_mean_k1": (0.8, 1.25)}),
        # verl bounds engine / trainer, we bound trainer / engine.
        (["rollout_rs=token_k1", "rollout_rs_threshold='0.5_4.0'"], {"token_k1": (0.25, 2.0)}),
        (["rollout_rs=seq_sum_k1", "rollout_rs_threshold=2"], {"seq_sum_k1": 2.0}),
        (["rollout_rs='token_k2,seq_max_k3'", "rollout_rs_threshold=0.5"], {"token_k2": 0.5, "seq_max_k3": 0.5}),
        (["rollout_rs='token_k2,seq_max_k3'", "rollout_rs_threshold='0.5,0.1'"], {"token_k2": 0.5, "seq_max_k3": 0.1}),
        (
            ["rollout_rs=geometric", "rollout_rs_threshold=1.01", "rollout_rs_threshold_lower=0.98"],
            {"seq_mean_k1": (0.98, 1.01)},
        ),
        (["rollout_token_veto_threshold=1e-4"], {"token_veto": 1e-4}),
    ],
)
def test_rejection(line: list[str], rejection: dict[str, Any]) -> None:
    criteria = corrected(*line)[0].algorithm.rejection
    assert criteria.keys() == rejection.keys()
    for criterion, bound in criteria.items():
        assert bound == pytest.approx(rejection[criterion])


def test_normalized_weights() -> None:
    config, _ = corrected("rollout_is=sequence", "rollout_is_batch_normalize=true")
    assert config.algorithm.correction_normalize
    assert not corrected("rollout_is_batch_normalize=true")[0].algorithm.correction_normalize
    bypass = ["bypass_mode=true", "loss_type=reinforce", "rollout_is=sequence", "rollout_is_batch_normalize=true"]
    _, notes = corrected(*bypass)
    assert "divides weights by their mean over a micro-batch" in notes[-1]


def test_bypass_mode_takes_the_ratio_to_the_engine() -> None:
    config, notes = corrected("bypass_mode=True", "rollout_is=token")
    assert (config.algorithm.old_log_probs, config.actor.policy_loss) == ("engine", "ppo")
    assert config.algorithm.correction == "none"
    assert any("the ratio of ppo_clip corrects for the engine" in note for note in notes)
    config, _ = corrected("bypass_mode=True", "loss_type=reinforce", "rollout_is=sequence", "rollout_rs=null")
    assert (config.algorithm.old_log_probs, config.actor.policy_loss) == ("engine", "gpg")
    assert config.algorithm.correction == "sequence_tis"
    assert corrected("bypass_mode=False", "loss_type=reinforce")[0].actor.policy_loss == "ppo"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["rollout_is=geometric"], "rollout_is=geometric is not supported here"),
        (["rollout_rs=token_k4", "rollout_rs_threshold=2"], "rollout_rs=token_k4 is not supported here"),
        (["rollout_rs=token_k1"], "rollout_rs needs bounds"),
        (["rollout_rs='token_k1,token_k2'", "rollout_rs_threshold='1,2,3'"], "3 bounds for 2 criteria"),
        (["rollout_is=token", "rollout_is_threshold=high"], "expected numbers above 0"),
        (["bypass_mode=true", "loss_type=dpo"], "loss_type=dpo is not supported here"),
    ],
)
def test_what_has_no_meaning_is_refused(line: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        corrected(*line)


@pytest.mark.parametrize("off", ["-1", "-1.0", "null", "false"])
def test_a_ratio_cap_that_is_off_sets_no_correction(off: str) -> None:
    assert load_config([], [f"actor_rollout_ref.actor.tis_imp_ratio_cap={off}"])[0].algorithm.correction == "none"
