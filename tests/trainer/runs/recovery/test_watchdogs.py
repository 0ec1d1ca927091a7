"""Watchdogs on series of metrics: when they trigger, and their action."""

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from tests.training_state import training_state
from trainer.config.sections.watchdogs import Watchdog, WatchdogsConfig
from trainer.config.tree import Config
from trainer.errors import WatchdogError
from trainer.runs.checkpoints.manifest import TrainingState
from trainer.runs.recovery.watchdogs import KINDS, Alarm, UpdateGuard, Watchdogs, most_severe

METRICS = {"reward/mean": 0.5, "reference/kl": 0.1, "actor/entropy": 1.0, "rollout/ratio_outside_tenth": 0.0}
FINE = METRICS | {"memory/node_gib": 8.0}


def rings(settings: dict[str, object], series: list[dict[str, float]]) -> list[list[str]]:
    dogs = Watchdogs(WatchdogsConfig.model_validate(settings))
    return [[alarm.name for alarm in dogs.look(FINE | metrics)] for metrics in series]


def test_a_healthy_run_is_silent() -> None:
    assert rings({}, [{}] * 100) == [[]] * 100


@pytest.mark.parametrize(
    ("name", "metric", "value"),
    [
        ("kl", "reference/kl", 2.0),
        ("kl", "reference/kl", math.nan),
        ("entropy", "actor/entropy", 0.001),
        ("entropy", "actor/entropy", math.nan),
        ("ratio_drift", "rollout/ratio_outside_tenth", 0.3),
    ],
)
def test_one_bad_step_triggers_at_once(name: str, metric: str, value: float) -> None:
    assert rings({}, [{}, {metric: value}, {}]) == [[], [name], []]


def test_the_reward_triggers_on_its_deviation_over_a_full_window() -> None:
    swings = [{"reward/mean": 1.0 if step % 2 else -1.0} for step in range(12)]
    alarms_of_steps = rings({}, swings)
    assert alarms_of_steps[:9] == [[]] * 9
    assert alarms_of_steps[9:] == [["reward_deviation"]] * 3
    assert rings({"reward_deviation": {"threshold": 1.5}}, swings) == [[]] * 12


def test_memory_triggers_on_a_steady_rise_and_not_on_a_single_jump() -> None:
    rise = [{"memory/node_gib": 8 + 0.2 * step} for step in range(20)]
    step = [{"memory/node_gib": 8.0 if at < 10 else 8.5} for at in range(20)]
    settings = {"memory_growth": {"window": 20}}
    assert rings(settings, rise)[-1] == ["memory_growth"]
    assert rings(settings, step)[-1] == []


def test_a_disabled_watchdog_is_silent_and_messages_give_the_value() -> None:
    assert rings({"kl": {"action": "off"}}, [{"reference/kl": 9.0}]) == [[]]
    dogs = Watchdogs(WatchdogsConfig.model_validate({"kl": {"action": "stop"}}))
    message = "KL to the reference per token is 9, above 1"
    assert dogs.look({"reference/kl": 9.0}) == [Alarm("kl", "stop", message, "reference/kl")]


def test_an_alarm_knows_how_many_steps_may_be_at_fault() -> None:
    """A deviation may begin anywhere in its window, a limit on the last value is crossed in the last step."""
    dogs = Watchdogs(WatchdogsConfig.model_validate({"kl": {"window": 10}}))
    alarms = [dogs.look(FINE | {"reward/mean": float(at % 2) * 4, "reference/kl": 9.0}) for at in range(10)][-1]
    assert {alarm.name: alarm.steps for alarm in alarms} == {"kl": 1, "reward_deviation": 10}


def test_the_longest_window_that_rolls_back_decides_how_old_a_checkpoint_must_be() -> None:
    def lag(**settings: dict[str, object]) -> int | None:
        return Watchdogs(WatchdogsConfig.model_validate(settings)).lag

    assert lag() is None
    assert lag(kl={"action": "roll_back", "window": 10}) == 1
    assert lag(kl={"action": "roll_back"}, reward_deviation={"action": "roll_back", "window": 10}) == 10
    assert lag(kl={"action": "roll_back"}, reward_deviation={"action": "stop"}) == 1


def test_the_most_severe_action_decides() -> None:
    def alarm(action: str) -> Alarm:
        return Alarm("kl", action, "")

    assert most_severe([]) == "off"
    assert most_severe([alarm("log"), alarm("skip")]) == "skip"
    assert most_severe([alarm("roll_back"), alarm("stop"), alarm("log")]) == "stop"


class Checkpoints:
    """Stands in for a saver with checkpoints of some steps."""

    def __init__(self, *steps: int) -> None:
        self.steps, self.lag, self.schedule = steps, 0, SimpleNamespace(retry=lambda _seconds: None)

    def keep_for_roll_backs(self, lag: int) -> None:
        self.lag = lag

    def settle(self) -> None:
        """Nothing is under way."""

    def before(self, step: int) -> Path | None:
        earlier = [saved for saved in self.steps if saved < step]
        return Path(f"step_{earlier[-1]}") if earlier else None


def guard(
    settings: Mapping[str, Any] = MappingProxyType({}),
    checkpoints: Checkpoints | None = None,
    load_weights: Callable[[Path], None] = lambda _checkpoint: None,
) -> UpdateGuard:
    session: Any = SimpleNamespace(
        saver=checkpoints or Checkpoints(),
        load_weights=load_weights,
        tracker=SimpleNamespace(phase=lambda _name: nullcontext()),
    )
    return UpdateGuard(session, WatchdogsConfig.model_validate(settings))


def test_a_watchdog_that_stops_raises_an_error_that_names_it() -> None:
    with pytest.raises(WatchdogError, match="watchdog kl: KL to the reference"):
        guard({"kl": {"action": "stop"}}).allows(3, {"reference/kl": 9.0})


def test_a_roll_back_loads_the_last_checkpoint_before_the_first_faulty_weights() -> None:
    """The KL of step 5 measures the weights of step 4."""
    loaded: list[Path] = []
    checkpoints = Checkpoints(1, 3, 4)
    assert not guard({"kl": {"action": "roll_back"}}, checkpoints, loaded.append).allows(5, {"reference/kl": 9.0})
    assert (loaded, checkpoints.lag) == ([Path("step_3")], 1)


def alarms(watched: UpdateGuard, step: int) -> list[str]:
    """The watchdogs that ring in a step. The reward swings, memory grows, and each update spoils the entropy."""
    metrics = {"reward/mean": 4.0 * (step % 2), "rollout/ratio_outside_tenth": math.nan}
    watched.allows(step, metrics)
    watched.updated({"actor/entropy": 0.0})
    return [name.removeprefix("watchdog/") for name in metrics if name.startswith("watchdog/")]


def resumed(watched: UpdateGuard) -> UpdateGuard:
    """One that continues from a checkpoint after the last step."""
    state = training_state(9).model_copy(update=watched.state())
    again = guard()
    again.resume(TrainingState.model_validate_json(state.model_dump_json()))
    return again


def test_a_resumed_run_rings_in_the_same_steps_as_one_that_goes_on() -> None:
    watched = guard()
    assert [alarms(watched, step) for step in range(1, 10)] == [["ratio_drift"], *[["entropy", "ratio_drift"]] * 8]
    again = resumed(watched)
    assert alarms(watched, 10) == alarms(again, 10) == ["reward_deviation", "entropy", "ratio_drift"]


def test_a_step_that_is_taken_again_rings_as_before() -> None:
    watched = guard()
    for step in range(1, 10):
        alarms(watched, step)
    go_back = watched.snapshot()
    for _ in range(2):
        assert alarms(watched, 10) == ["reward_deviation", "entropy", "ratio_drift"]
        go_back()


def test_a_resumed_run_measures_the_growth_of_memory_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes are new, and perhaps its node."""
    used = iter(range(0, 100 * 2**30, 2**30))
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(used=next(used)))
    watched = guard()
    assert ["memory_growth" in alarms(watched, step) for step in range(1, 51)] == [False] * 49 + [True]
    assert "memory_growth" not in alarms(resumed(watched), 51)


def test_every_watchdog_has_settings_and_a_roll_back_needs_checkpoints() -> None:
    fields = WatchdogsConfig.model_fields
    assert {name for name in fields if isinstance(fields[name].default, Watchdog)} == set(KINDS)
    with pytest.raises(ValueError, match=r"set trainer\.save_freq"):
        Config.model_validate({"watchdogs": {"kl": {"action": "roll_back"}}})
    Config.model_validate({"watchdogs": {"kl": {"action": "roll_back"}}, "trainer": {"save_freq": 5}})
