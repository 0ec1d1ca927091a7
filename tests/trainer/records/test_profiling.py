"""Traces and thresholds."""

import json
from pathlib import Path

import torch

from trainer.config.sections.trainer import ProfilerConfig
from trainer.records.profiling import SlowPhases, Tracer


def test_a_trace_names_what_torch_did_between_start_and_stop(tmp_path: Path) -> None:
    tracer = Tracer()
    for name, operation in (("first", torch.Tensor.exp), ("second", torch.Tensor.sin)):
        tracer.start()
        operation(torch.ones(8))
        tracer.stop(tmp_path / "traces" / f"{name}.json")
    events = [json.loads((tmp_path / "traces" / f"{n}.json").read_text())["traceEvents"] for n in ("first", "second")]
    names = [{event.get("name") for event in trace} for trace in events]
    assert "aten::exp" in names[0] - names[1]
    assert "aten::sin" in names[1] - names[0]


def test_slow_phases_are_reported_with_their_threshold() -> None:
    seconds = {"time/load": 0.02, "time/old_log_prob": 0.07, "time/update_critic": 0.2, "time/generate": 9.0}
    assert SlowPhases(ProfilerConfig(loading_ms=10, actor_forward_ms=80, critic_update_ms=150)).of_step(seconds) == [
        "load took 20 ms, the threshold is 10 ms",
        "update_critic took 200 ms, the threshold is 150 ms",
    ]


def test_without_a_threshold_a_phase_is_compared_with_the_run_s_median() -> None:
    phases = SlowPhases(ProfilerConfig())
    steps = [phases.of_step({"time/load": seconds}) for seconds in (9.0, 0.1, 0.1, 0.15, 0.3)]
    assert steps == [[], [], [], [], ["load took 300 ms, the threshold is 250 ms"]]
    assert phases.of_step({}) == []
