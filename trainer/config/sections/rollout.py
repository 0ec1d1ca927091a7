"""Settings of the engines that sample."""

from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from trainer.algorithms.truncation import Truncation
from trainer.config.custom_code import CustomCode
from trainer.config.section import AbsolutePath, Arguments, Section
from trainer.rows import module_names

if TYPE_CHECKING:
    EngineName = str
    FormatName = str
else:
    EngineName = Literal["auto", *module_names("rollout/backends")]
    FormatName = Literal[module_names("experience/formats")]


class ToolsConfig(Section):
    """Calls of the tools in `data.tools_file`."""

    format: FormatName = Field("hermes", description="format in which the model writes calls")
    max_parallel_calls: int = Field(1, gt=0, description="calls of a turn that run; further ones are ignored")
    max_response_length: int = Field(256, gt=0, description="characters of a tool's answer that the policy sees")
    truncate_side: Literal["left", "middle", "right"] = Field(
        "middle", description="side of a longer answer that is cut"
    )


class ProgramConfig(Section):
    """An agent program: it talks to the policy through an OpenAI-compatible endpoint, once per trajectory."""

    command: list[str] = Field(
        [],
        description="program and arguments, like [python, agent.py]; {question} stands for the row's question. Its "
        "environment has OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL; its task is JSON on standard input",
    )
    processes: int = Field(64, gt=0, description="programs that run at once")
    environment: dict[str, str] = Field({}, description="further variables of its otherwise clean environment")


HUBS = module_names("experience/hubs")


class EnvironmentConfig(CustomCode):
    """What answers the policy's turns: a class of the user, or an environment of a hub."""

    plain_value: ClassVar[str] = "hub"

    hub: str | None = Field(
        None,
        description=f"HUB:NAME, an environment with its own data set, turns, tools and scores; hubs: {', '.join(HUBS)}",
    )
    arguments: Arguments = Field({}, description="arguments of the hub's environment")
    python: str | None = Field(
        None, description="Python that the hub's packages are installed for; null: the trainer's own"
    )

    @property
    def given(self) -> bool:
        """Whether an environment answers the policy."""
        return self.path is not None or self.hub is not None

    @model_validator(mode="after")
    def _a_class_or_a_hub(self) -> Self:
        if self.hub is None:
            if self.arguments or self.python is not None:
                raise ValueError("arguments and python belong to an environment of a hub: set hub, or leave them out")
            return self
        hub, _, name = self.hub.partition(":")
        if hub not in HUBS or not name:
            raise ValueError(f"{self.hub} is not HUB:NAME; hubs: {', '.join(HUBS)}")
        if self.path is not None:
            raise ValueError(f"path={self.path} and hub={self.hub} both answer the policy: leave out one of them")
        return self


class RolloutConfig(Section):
    engine: EngineName = Field(
        "auto", description="engine that samples; auto: vLLM if installed, else Transformers, which is slower"
    )
    timeout: float | None = Field(
        None,
        gt=0,
        description="seconds without an answer after which an engine is replaced; null: trainer.worker_timeout",
    )
    max_repairs: int = Field(3, ge=0, description="engine replacements allowed in a row; the next failure ends the run")
    samples_per_prompt: int = Field(4, gt=0, description="responses to each prompt of a step")
    lora: Literal["merged", "adapters"] = Field(
        "merged",
        description="merged: the actor adds its LoRA adapters to the weights at each hand-over, so generation costs no"
        " more than without; rounding to model.dtype changes the sampled distribution slightly. adapters: "
        "engines get only the adapters and apply them beside the frozen weights",
    )
    weight_transfer: Literal["auto", "object_store", "broadcast"] = Field(
        "auto",
        description="transport of weights to engines on other GPUs than the actor's. broadcast: NCCL, gloo on CPU; "
        "auto: NCCL if every process has its own GPU, else Ray's object store",
    )
    segment_length: int = Field(
        64,
        gt=0,
        description="asynchronous: tokens between two chances for new weights and prompts; from "
        "data.max_response_length on, responses finish under the weights that they began with. "
        "Environments, tools and programs: tokens until answered conversations continue",
    )
    environment: EnvironmentConfig = Field(
        EnvironmentConfig(),
        description="class that answers the policy's turns, see trainer/experience/environment.py; or HUB:NAME",
    )
    agent: Literal["auto", "single_turn", "tools", "program"] = Field(
        "auto",
        description="what answers the policy's turns in rows without `agent_name`. auto: rollout.environment, if "
        "given; single_turn: nothing; tools: data.tools_file and rollout.interactions_file; program: "
        "rollout.program",
    )
    program: ProgramConfig = ProgramConfig()
    tools: ToolsConfig = ToolsConfig()
    interactions_file: AbsolutePath | None = Field(
        None, description="YAML file with simulated users, who answer turns without a call; null: none"
    )
    max_turns: int | None = Field(
        8, gt=0, description="maximum turns of the policy in a conversation; null: data.max_response_length alone"
    )
    environment_timeout: float = Field(
        10.0, gt=0, description="seconds without an answer after which an environment counts as failed"
    )
    retries: int = Field(
        1,
        ge=0,
        description="further attempts at a failed response: sampled again if its environment or program failed, scored "
        "again if the reward took too long or its server or sandbox failed",
    )
    max_failed_share: float = Field(
        0.5, ge=0, le=1, description="share of failed responses in a step above which the run stops"
    )
    environment_calls: int = Field(
        64,
        gt=0,
        description="environments and conversations with tools that compute an answer at once, each in a thread of the"
        " controller; the log warns if engines idle because of this limit. Raise it for those that wait "
        "for servers",
    )
    temperature: float = Field(1.0, gt=0, description="sampling temperature; all log-probs use it too")
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="sample only the likeliest tokens with this share of the probability. Engines return log-probs of "
        "the truncated distribution, the trainer computes those of the whole one",
    )
    top_k: int | None = Field(None, gt=0, description="sample only the k likeliest tokens; null: all")
    min_p: float = Field(
        0.0, ge=0, le=1, description="sample only tokens with at least this share of the likeliest one's probability"
    )
    stop: list[str] = Field([], description="texts that end a response or a turn; they stay in the text that is scored")
    max_num_seqs: int = Field(
        256,
        gt=0,
        description="maximum concurrent responses per engine; chosen on GPUs if not given (`trainer plan`). Decode "
        "steps of more than 1,024 have no CUDA graphs",
    )
    kv_cache_gib: float | None = Field(
        None,
        gt=0,
        description="GiB of KV cache per engine and GPU; 0.5 on CPU, chosen on GPUs if neither this nor "
        "gpu_memory_utilization is given (`trainer plan`)",
    )
    gpu_memory_utilization: float = Field(
        0.4, gt=0, le=1, description="share of a GPU's memory that engines may use, if given"
    )
    enforce_eager: bool | None = Field(
        None, description="disable compilation and CUDA graphs in the engine; when not given, only on CPU"
    )
    tensor_parallel: int = Field(
        1,
        gt=0,
        description="neighbouring GPUs of a node that one engine spans; on CPU, processes of a node",
    )
    engines_per_gpu: int = Field(
        1,
        gt=0,
        description="engines per GPU; use 2 if the log says that the decode fast path is off",
    )
    quantization: Literal["fp8"] | None = Field(
        None,
        description="fp8: engines quantise their weights to 8 bits at each update. The sampled policy then differs "
        "from the actor's: set algorithm.correction. NVIDIA GPUs from Ada and Hopper on, vLLM only",
    )
    speculative_tokens: int = Field(
        0,
        ge=0,
        le=64,
        description="most tokens that an engine drafts from what a response or its group has said before, and verifies "
        "in one step; 0: none. Same seeds give the same responses with and without it. An engine drafts only while "
        "that pays: for few, long, repetitive responses; with vLLM",
    )
    prefix_caching: bool = Field(
        True, description="share the KV cache of a common start of prompts, as in a group; never across a weight update"
    )
    sleep: bool = Field(True, description="engines free their GPU memory during training")
    compare_freq: int = Field(
        10,
        ge=0,
        description="steps between comparisons of the engines' log-probs with the trainer's, from the first step on; "
        "0: none. Every step has them if something else reads them: a correction, rejection, "
        "old_log_probs=engine, an action of watchdogs.ratio_drift, trainer.trajectories.per_token",
    )
    ignore_end_tokens: bool = Field(
        False, description="ignore end tokens, so that every response reaches the limit; for benchmarks"
    )

    @model_validator(mode="after")
    def _engines_know_their_share(self) -> Self:
        if self.engines_per_gpu > 1 and self.tensor_parallel > 1:
            raise ValueError(
                f"rollout.tensor_parallel={self.tensor_parallel} needs rollout.engines_per_gpu=1: engines that span "
                "several GPUs do not share them with each other"
            )
        if self.engines_per_gpu > 1 and self.kv_cache_gib is None:
            raise ValueError(
                f"rollout.engines_per_gpu={self.engines_per_gpu} needs rollout.kv_cache_gib: "
                "engines that start side by side cannot measure how much memory is left for each"
            )
        return self

    @model_validator(mode="after")
    def _one_answers(self) -> Self:
        if (self.agent == "program") != bool(self.program.command):
            raise ValueError("rollout.agent=program and rollout.program.command belong together: set both")
        if self.uses_endpoint and self.stop:
            raise ValueError(
                "rollout.agent=program and environments of a hub do not support rollout.stop: a stop text may lie on "
                "both sides of a segment"
            )
        if self.environment.given and self.agent != "auto":
            raise ValueError(f"rollout.environment answers all turns itself: leave out rollout.agent={self.agent}")
        return self

    @model_validator(mode="after")
    def _drafts_can_be_verified(self) -> Self:
        if self.speculative_tokens and self.stop:
            raise ValueError(
                "rollout.speculative_tokens does not support rollout.stop: a step may sample tokens behind a stop text"
            )
        return self

    @field_validator("stop")
    @classmethod
    def _stops_have_text(cls, stop: list[str]) -> list[str]:
        if "" in stop:
            raise ValueError("an empty text would end every response at once")
        return stop

    @property
    def uses_endpoint(self) -> bool:
        """Whether conversations reach the policy over the endpoint: those of programs and of a hub's environment."""
        return self.agent == "program" or self.environment.hub is not None

    @property
    def truncation(self) -> Truncation:
        """Which tokens may be sampled."""
        return Truncation(self.top_p, self.top_k, self.min_p)

    def eager_on(self, device: str) -> bool:
        return device == "cpu" if self.enforce_eager is None else self.enforce_eager


class ValidationConfig(Section):
    samples: int = Field(1, gt=0, description="responses to each held-out prompt")
    temperature: float = Field(0.0, ge=0, description="sampling temperature; 0: greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="sample only the likeliest tokens that hold this probability")
    top_k: int | None = Field(None, gt=0, description="sample only the k likeliest tokens; null: all")
    min_p: float = Field(
        0.0, ge=0, le=1, description="sample only tokens with at least this share of the likeliest one's probability"
    )

    @property
    def truncation(self) -> Truncation:
        """Which tokens may be sampled."""
        return Truncation(self.top_p, self.top_k, self.min_p)
