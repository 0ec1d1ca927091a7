"""verl's keys of the loss: the same loss, with verl's defaults for what is not given."""

import pytest

from trainer.algorithms.losses.clipping import lower_and_upper
from trainer.algorithms.registry import POLICY_LOSSES
from trainer.compat.settings import load_config
from trainer.config.sections.roles import ActorConfig
from trainer.config.tree import Config
from trainer.errors import ConfigError

ACTOR = "actor_rollout_ref.actor"


def translated(*line: str) -> tuple[Config, list[str]]:
    return load_config(["verl"], list(line))


def actor(*line: str) -> tuple[ActorConfig, list[str]]:
    config, notes = translated(*line)
    return config.actor, notes


@pytest.mark.parametrize(
    ("theirs", "ours", "parameters"),
    [
        ("vanilla", "ppo", {"clip_ratio": 0.2, "clip_dual": 3.0}),
        ("gspo", "gspo", {"clip_ratio": 0.2}),
        ("cispo", "cispo", {"clip_ratio": 0.2}),
        ("geo_mean", "gmpo", {"clip_ratio": 0.2}),
        ("gpg", "gpg", {}),
        ("sapo", "sapo", {"tau_positive": 1.0, "tau_negative": 1.05}),
        ("clip_cov", "clip_cov", {"clip_cov_ratio": 0.0002, "clip_cov_low": 1.0, "clip_cov_high": 5.0}),
        ("kl_cov", "kl_cov", {"kl_cov_ratio": 0.0002, "kl_cov_coefficient": 0.1}),
        ("dppo_tv", "dppo_tv", {"clip_ratio": 0.2, "clip_dual": 3.0}),
        ("dppo_kl", "dppo_kl", {"clip_ratio": 0.2, "clip_dual": 3.0}),
    ],
)
def test_each_loss_has_verls_defaults(theirs: str, ours: str, parameters: dict[str, float]) -> None:
    settings, _ = actor(f"{ACTOR}.policy_loss.loss_mode={theirs}")
    assert settings.policy_loss == ours
    assert {name: getattr(settings, name) for name in parameters} == parameters
    assert parameters.keys() <= POLICY_LOSSES[ours].parameters.keys()


def test_parameters_reach_the_loss_that_uses_them() -> None:
    section = f"{ACTOR}.policy_loss"
    settings, _ = actor(f"{section}.loss_mode=clip_cov", f"{section}.clip_cov_ratio=0.01", f"{section}.clip_cov_lb=0.5")
    assert (settings.clip_cov_ratio, settings.clip_cov_low) == (0.01, 0.5)
    settings, _ = actor(f"{section}.loss_mode=kl_cov", f"{section}.ppo_kl_coef=1.0")
    assert settings.kl_cov_coefficient == 1.0
    settings, _ = actor(f"{section}.loss_mode=sapo", f"{ACTOR}.tau_pos=2.0", f"+{section}.tau_neg=3.0")
    assert (settings.tau_positive, settings.tau_negative) == (2.0, 3.0)


@pytest.mark.parametrize(
    ("given", "aggregation", "noted"),
    [
        ([], "token-mean", True),
        (["loss_agg_mode=token-mean", "use_kl_loss=true"], "token-mean", True),
        (["loss_agg_mode=seq-mean-token-mean"], "seq-mean-token-mean", False),
    ],
)
def test_gspo_is_aggregated_as_in_verl_0_9_and_earlier_versions_are_noted(
    given: list[str], aggregation: str, noted: bool
) -> None:
    settings, notes = actor(f"{ACTOR}.policy_loss.loss_mode=gspo", *(f"{ACTOR}.{setting}" for setting in given))
    assert settings.loss_aggregation == aggregation
    assert any("earlier versions averaged over each response" in note for note in notes) == noted


def test_a_constant_length_divides_the_losses_of_both_roles() -> None:
    normed = f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"
    config, notes = translated(normed, f"{ACTOR}.loss_scale_factor=700")
    assert (config.actor.loss_scale_length, config.critic.loss_scale_length) == (700, 700)
    assert config.critic.loss_aggregation == config.actor.loss_aggregation == "seq-mean-token-sum-norm"
    assert not notes
    config, _ = translated(normed, f"{ACTOR}.loss_scale_factor=700", "critic.loss_agg_mode=token-mean")
    assert (config.actor.loss_scale_length, config.critic.loss_scale_length) == (700, None)
    config, _ = translated(normed, f"{ACTOR}.loss_scale_factor=700", "critic.loss_scale_factor=500")
    assert (config.actor.loss_scale_length, config.critic.loss_scale_length) == (700, 500)


@pytest.mark.parametrize(
    ("line", "note"),
    [
        (["policy_loss.loss_mode=geo_mean"], "verl 0.9 adds up the means of micro-batches"),
        (["loss_agg_mode=seq-mean-token-sum-norm"], "verl 0.9 divides by the longest response of each micro-batch"),
        (["loss_scale_factor=700"], "loss_scale_factor has no effect"),
        (
            ["policy_loss.loss_mode=gspo", "clip_ratio_c=10.0"],
            f"{ACTOR}.clip_ratio_c has no effect: the policy loss gspo does not use it",
        ),
    ],
)
def test_what_differs_from_verl_or_has_no_effect_is_noted(line: list[str], note: str) -> None:
    settings, notes = actor(*(f"{ACTOR}.{setting}" for setting in line))
    assert any(note in given for given in notes)
    assert (settings.loss_scale_length, settings.clip_dual) == (None, 3.0)


@pytest.mark.parametrize(
    ("line", "bounds"),
    [
        ({}, (0.2, 0.2)),
        ({"clip_ratio": "0.2"}, (0.2, 0.2)),
        ({"clip_ratio_high": "0.28"}, (0.2, 0.28)),
        ({"clip_ratio": "0.2", "clip_ratio_high": "0.28"}, (0.2, 0.28)),
        ({"clip_ratio": "0.3", "clip_ratio_low": "0.1", "clip_ratio_high": "0.28"}, (0.1, 0.28)),
        ({"clip_ratio": "0.3", "clip_ratio_low": "null", "clip_ratio_high": "null"}, (0.3, 0.3)),
        ({"clip_ratio": "0.3", "clip_ratio_low": "null", "clip_ratio_high": "0.4"}, (0.3, 0.4)),
    ],
)
def test_ratios_are_clipped_where_verl_clips_them(line: dict[str, str], bounds: tuple[float, float]) -> None:
    settings, _ = actor(*(f"{ACTOR}.{name}={value}" for name, value in line.items()))
    clipped = lower_and_upper(settings.clip_ratio, settings.clip_ratio_low, settings.clip_ratio_high)
    assert clipped == bounds


@pytest.mark.parametrize("other", [[], [f"{ACTOR}.clip_ratio_low=0.3"], [f"{ACTOR}.clip_ratio_high=0.3"]])
def test_a_clip_ratio_that_verl_does_not_read_is_refused(other: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"clip_ratio=0\.3 has no effect in verl") as caught:
        actor(f"{ACTOR}.clip_ratio=0.3", *other)
    assert caught.value.hint == f"set {ACTOR}.clip_ratio_low and {ACTOR}.clip_ratio_high"


def test_dro_needs_its_weight() -> None:
    mode = f"{ACTOR}.policy_loss.loss_mode=dro"
    assert actor(mode, f"{ACTOR}.policy_loss.dro_beta=0.5")[0].dro_beta == 0.5
    with pytest.raises(ConfigError, match="loss_mode=dro needs a weight"):
        actor(mode)


@pytest.mark.parametrize(
    ("line", "estimator", "unbiased"),
    [
        ((), "k3", False),
        (("low_var_kl",), "k3", False),
        (("low_var_kl+",), "k3", True),
        (("k3+",), "k3", True),
        (("kl",), "k1", False),
        (("mse",), "k2", False),
        (("abs",), "abs", False),
    ],
)
def test_the_kl_in_the_loss_has_verls_gradient(line: tuple[str, ...], estimator: str, unbiased: bool) -> None:
    settings, _ = actor(f"{ACTOR}.use_kl_loss=True", *(f"{ACTOR}.kl_loss_type={kind}" for kind in line))
    assert settings.kl_loss_coefficient == 0.001
    assert (settings.kl_loss_estimator, settings.kl_loss_unbiased) == (estimator, unbiased)
