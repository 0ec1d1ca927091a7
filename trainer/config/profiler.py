"""What is traced, and which phases are expected to be how fast."""

from pathlib import Path

from pydantic import Field

from trainer.config.section import Section


class ProfilerConfig(Section):
    enable: bool = Field(False, description="write torch traces of some steps, and warn about slow phases")
    dir: Path | None = Field(
        None, description="where traces go, a file per step, role and rank; RUN/traces if not given"
    )
    steps: list[int] = Field([2], description="steps that are traced; the first one is not like the others")
    actor_forward_ms: float | None = Field(
        80.0, gt=0, description="milliseconds of old_log_prob before it is called slow"
    )
    critic_update_ms: float | None = Field(150.0, gt=0, description="the same of update_critic")
    loading_ms: float | None = Field(10.0, gt=0, description="the same of loading a batch of prompts")
