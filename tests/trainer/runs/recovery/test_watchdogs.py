"""Watchdogs on series of metrics: when they trigger, and their action."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from tests.training_state import training_state
from trainer.config.sections.watchdogs import Watchdog, WatchdogsConfig
from trainer.config.tree import Config
from trainer.data.dataset import PromptSampler
from trainer.errors import WatchdogError
from trainer.runs.checkpoints.manifest import TrainingState
from trainer.runs.checkpoints.saving import ROUNDS
from trainer.runs.ppo import Controller
from trainer.runs.recovery.watchdogs import KINDS, Alarm, Watchdogs, most_severe

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
    found = rings({}, swings)
    assert found[:9] == [[]] * 9
    assert found[9:] == [["reward_deviation"]] * 3
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


class StoppedRun(Controller):
    """A run after its second step whose KL ends it in the third, before anything has changed."""

    def __init__(self) -> None:
        self._settings = Config().trainer
        self.stop = SimpleNamespace(check=lambda: None)  # type: ignore[assignment]
        self.tracker = SimpleNamespace(phase=lambda _: nullcontext())  # type: ignore[assignment]
        self.saver = SimpleNamespace(healthy=lambda: True, save=self.save)  # type: ignore[assignment]
        self.watchdogs = Watchdogs(WatchdogsConfig.model_validate({"kl": {"action": "stop"}}))
        self.after_update = {}
        self.progress = training_state(2)
        self._settled, self._unlogged = True, None
        self.saved: list[int] = []

    def save(self, state: TrainingState, _rounds: int = ROUNDS) -> None:
        self.saved.append(state.step)

    def end(self) -> None:
        """Takes the third step up to its update, and ends as a run does that fails."""
        try:
            self.begin_update()
            self.may_update(3, {"reference/kl": 9.0})
        finally:
            self._save_before_ending()


def test_a_run_that_a_watchdog_stops_saves_its_last_step(caplog: pytest.LogCaptureFixture) -> None:
    run = StoppedRun()
    with pytest.raises(WatchdogError, match="watchdog kl: KL to the reference"):
        run.end()
    assert run.saved == [2]
    assert "it failed while it changed the weights" not in caplog.text


class ResumableRun(Controller):
    """A run with a checkpoint in memory and no worker."""

    def __init__(self) -> None:
        self.config = Config()
        self._settings, self._dump, self._lowered = self.config.trainer, {}, ()
        self.engines = SimpleNamespace(start=lambda: None)  # type: ignore[assignment]
        sampler = PromptSampler(8, 1, shuffle=False, seed=0)
        self.pipeline = SimpleNamespace(sampler_state=sampler.state_dict)  # type: ignore[assignment]
        self._sampler = sampler
        self.records = SimpleNamespace(truncate=lambda _: None)  # type: ignore[assignment]
        self.kl_coefficient, self.exact_matches = 0.0, []
        self.watchdogs, self.after_update = Watchdogs(self.config.watchdogs), {}

    def take(self, step: int) -> list[str]:
        """The watchdogs that ring in a step. The reward swings, memory grows, and each update spoils the entropy."""
        metrics = {"reward/mean": 4.0 * (step % 2), "rollout/ratio_outside_tenth": math.nan}
        self.may_update(step, metrics)
        self.after_update = {"actor/entropy": 0.0}
        return [name.removeprefix("watchdog/") for name in metrics if name.startswith("watchdog/")]

    def resumed(self) -> "ResumableRun":
        """A run that continues from a checkpoint after the last step."""
        run = ResumableRun()
        run.begin(TrainingState.model_validate_json(self.state(9).model_dump_json()))
        return run


def test_a_resumed_run_rings_in_the_same_steps_as_one_that_goes_on() -> None:
    run = ResumableRun()
    found = [run.take(step) for step in range(1, 10)]
    assert found == [["ratio_drift"], *[["entropy", "ratio_drift"]] * 8]
    resumed = run.resumed()
    assert run.take(10) == resumed.take(10) == ["reward_deviation", "entropy", "ratio_drift"]


def test_a_resumed_run_measures_the_growth_of_memory_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes are new, and perhaps its node."""
    used = iter(range(0, 100 * 2**30, 2**30))
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(used=next(used)))
    run = ResumableRun()
    assert ["memory_growth" in run.take(step) for step in range(1, 51)] == [False] * 49 + [True]
    assert "memory_growth" not in run.resumed().take(51)


def test_every_watchdog_has_settings_and_a_roll_back_needs_checkpoints() -> None:
    fields = WatchdogsConfig.model_fields
    assert {name for name in fields if isinstance(fields[name].default, Watchdog)} == set(KINDS)
    with pytest.raises(ValueError, match=r"set trainer\.save_freq"):
        Config.model_validate({"watchdogs": {"kl": {"action": "roll_back"}}})
    Config.model_validate({"watchdogs": {"kl": {"action": "roll_back"}}, "trainer": {"save_freq": 5}})
