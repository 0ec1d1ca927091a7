"""Settings of the engines that sample."""

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from trainer.config.custom_code import CustomCode
from trainer.config.section import Section
from trainer.rows import module_names

if TYPE_CHECKING:
    EngineName = str
else:
    EngineName = Literal["auto", *module_names("rollout/backends")]


class RolloutConfig(Section):
    engine: EngineName = Field(
        "auto", description="what samples; auto: vLLM where it is installed, else Transformers, which is slower"
    )
    timeout: float | None = Field(
        None,
        gt=0,
        description="seconds an engine may take to answer before it is replaced; null: trainer.worker_timeout",
    )
    max_repairs: int = Field(
        3, ge=0, description="engines that may be replaced in a row; what fails after that ends the run"
    )
    samples_per_prompt: int = Field(4, gt=0, description="responses to each prompt of a step")
    weight_transfer: Literal["auto", "object_store", "broadcast"] = Field(
        "auto",
        description="how weights get to engines that do not share the actor's GPUs; broadcast: NCCL between GPUs, gloo "
        "on CPU; auto: NCCL where each has a GPU of its own, else Ray's object store",
    )
    segment_length: int = Field(
        256, gt=0, description="trainer.mode=asynchronous: tokens after which engines may take new weights"
    )
    environment: CustomCode = Field(
        CustomCode(), description="a class that answers the policy's turns, see trainer/experience/environment.py"
    )
    max_turns: int = Field(8, gt=0, description="turns of the policy's in a conversation with the environment")
    environment_timeout: float = Field(10.0, gt=0, description="seconds after which an environment counts as failed")
    temperature: float = Field(1.0, gt=0, description="of sampling, and of every log-prob that is compared with it")
    max_num_seqs: int = Field(256, gt=0, description="responses that an engine works on at a time")
    kv_cache_gib: float | None = Field(
        None, gt=0, description="GiB of key-value cache per engine; on GPUs what is left of its share, on CPU 0.5"
    )
    gpu_memory_utilization: float = Field(0.4, gt=0, le=1, description="share of a GPU that an engine may take")
    enforce_eager: bool | None = Field(
        None, description="no compilation and no CUDA graphs in the engine; when not given, on CPU only"
    )
    engines_per_gpu: int = Field(
        1, gt=0, description="engines that share a GPU; several keep it busy while one of them schedules on the CPU"
    )
    sleep: bool = Field(True, description="engines give up their GPU memory while others train")
    log_probs: bool = Field(True, description="let engines return log-probs, to compare with the trainer's")
    ignore_end_tokens: bool = Field(False, description="responses always reach the limit; to measure speed")

    @model_validator(mode="after")
    def _engines_know_their_share(self) -> Self:
        if self.engines_per_gpu > 1 and self.kv_cache_gib is None:
            raise ValueError(
                f"rollout.engines_per_gpu={self.engines_per_gpu} needs rollout.kv_cache_gib: "
                "engines that start side by side cannot measure how much memory is left for each"
            )
        return self

    def eager_on(self, device: str) -> bool:
        return device == "cpu" if self.enforce_eager is None else self.enforce_eager
