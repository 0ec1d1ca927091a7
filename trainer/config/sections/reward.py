"""The settings of the reward: rules, the user's function or a server, and a reward model."""

from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, JsonValue, model_validator

from trainer.config.custom_code import CustomCode, load_custom
from trainer.config.pickled_code import unpickled
from trainer.config.section import ModelPath, Section, with_parameters
from trainer.rows import RewardRule, find_rows

RULES = find_rows("trainer.rewards.rules", RewardRule)
_KNOWN_SOURCES = {pattern: rule for rule in RULES.values() for pattern in rule.sources}
if TYPE_CHECKING:
    RuleName = str
    NameOrAuto = str
else:
    RuleName = Literal[tuple(RULES)]
    NameOrAuto = Literal[("auto", *RULES)]


class RewardModelConfig(Section):
    """A sequence classifier with one label, whole on each device of `device_mapping.reward`."""

    path: ModelPath | None = Field(None, description="directory or Hugging Face name of the reward model; null: none")
    weight: float = Field(1.0, description="weight of the reward model's score")
    dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="type of weights and activations; model.dtype when not given"
    )
    input: Literal["tokens", "text"] | None = Field(
        None,
        description="tokens: the policy's tokens; text: messages in the reward model's own chat template; "
        "when not given, tokens if both share a vocabulary",
    )
    max_length: int | None = Field(
        None,
        gt=0,
        description="maximum tokens per text, of which the last are kept; the model's limit when not given",
    )
    micro_batch_size: int = Field(16, gt=0, description="texts per forward pass")


class RewardFunction(CustomCode):
    """The user's function (data_source, solution_str, ground_truth, extra_info) -> score."""

    pickled: str | None = Field(None, repr=False, description="the function itself, as `trainer.train` writes it")
    kwargs: dict[str, JsonValue] = Field({}, description="further keyword arguments of the function")
    batched: bool = Field(
        False,
        description="true: one call scores all responses of a step: (data_sources, solution_strs, ground_truths, "
        "extra_infos) -> list of scores",
    )

    @model_validator(mode="after")
    def _belongs_to_a_function(self) -> Self:
        if self.path is not None and self.pickled is not None:
            raise ValueError("path and pickled are two functions: set one of them")
        if not self.given and (self.kwargs or self.batched):
            raise ValueError("kwargs and batched need a function: set path")
        return self

    @property
    def given(self) -> bool:
        """Whether the user gives a function."""
        return self.origin is not None

    @property
    def origin(self) -> tuple[str, str] | None:
        return super().origin if self.pickled is None else ("pickled", "a function of Python")

    def load(self) -> Callable[..., Any]:
        """The function. Raises ConfigError if it cannot be loaded."""
        if self.pickled is not None:
            return unpickled("reward.custom_function.pickled", self.pickled)
        assert self.path is not None
        return load_custom("reward.custom_function", self.path, self.name or "compute_score")


class RewardServer(Section):
    """A server that scores responses over HTTP."""

    url: str | None = Field(
        None, pattern="^https?://", description="where batches of responses are posted as JSON; null: no server"
    )
    batch_size: int = Field(16, gt=0, description="responses per request")
    requests: int = Field(8, gt=0, description="requests at once, of each reward worker")
    timeout: float = Field(60.0, gt=0, description="seconds that a request may take")
    retries: int = Field(3, ge=0, description="further attempts of a request that failed")


@partial(with_parameters, tables=(RULES,))
class RewardConfig(Section):
    name: NameOrAuto = Field(
        "auto",
        description="rule that scores a response: trainer/rewards/rules/; auto: by the row's data_source",
    )
    sources: dict[str, RuleName] = Field(
        {},
        description="rules of data sources for reward.name=auto, before the known ones: {my/data: math}",
    )
    weight: float = Field(
        1.0, description="weight of the score of the rule or function; 0: only the reward model scores"
    )
    text: Literal["policy", "conversation"] = Field(
        "policy",
        description="text of a conversation that rules and functions score. policy: the policy's own turns; "
        "conversation: everything after the prompt, as in verl",
    )
    model: RewardModelConfig = RewardModelConfig()
    custom_function: RewardFunction = RewardFunction()
    server: RewardServer = RewardServer()
    processes: int | None = Field(
        None,
        gt=0,
        description="processes per node for custom_function and rules that may hang, at least one per reward worker; "
        "one per core when not given",
    )
    process_memory_gib: float | None = Field(
        None,
        gt=0,
        description="GiB that such a process may allocate; unset: half of what the node or job has",
    )
    variables: list[str] = Field(
        [],
        description="secret environment variables that such processes get, like [OPENAI_API_KEY]; they get all others "
        "anyway",
    )
    timeout: float = Field(10.0, gt=0, description="seconds after which a reward counts as failed")
    failure_score: float | None = Field(
        None,
        description="score of a response that failed (`rollout/failed`); null: it is in no loss and no baseline",
    )
    max_failed_share: float | None = Field(
        None,
        ge=0,
        le=1,
        description="rollout.max_failed_share of rewards alone; null: they count in that one",
    )
    overlong_buffer: int = Field(
        0,
        ge=0,
        description="length of the range before data.max_response_length in which a response is penalised (DAPO), in "
        "tokens; 0: none",
    )
    overlong_penalty: float = Field(1.0, ge=0, description="penalty of a response of data.max_response_length tokens")

    @model_validator(mode="after")
    def _rule_has_its_parameters(self) -> Self:
        if self.sources and self.name != "auto":
            raise ValueError(f"reward.sources belongs to reward.name=auto, not to {self.name}")
        named = [RULES[name] for name in (set(self.sources.values()) if self.name == "auto" else [self.name])]
        for rule in named:
            for parameter in rule.parameters:
                if getattr(self, parameter) is None:
                    raise ValueError(f"the reward rule {rule.name} needs reward.{parameter}")
        usable = [*named, *_KNOWN_SOURCES.values()] if self.name == "auto" else named
        accepted = {parameter for rule in usable for parameter in rule.parameters}
        for rule in RULES.values():
            for parameter in rule.parameters.keys() - accepted:
                if getattr(self, parameter) != rule.parameters[parameter].default:
                    raise ValueError(f"reward.{parameter} belongs to reward.name={rule.name}, not to {self.name}")
        return self

    @model_validator(mode="after")
    def _something_scores(self) -> Self:
        if self.weight == 0 and self.model.path is None:
            raise ValueError("reward.weight=0 leaves nothing to score with: set reward.model.path")
        if self.server.url is not None and self.custom_function.given:
            raise ValueError("reward.server.url and reward.custom_function both score responses: set one of them")
        return self

    def rule_for(self, data_source: str) -> RewardRule | None:
        """The rule that scores rows of a data source; None if `reward.name=auto` knows none."""
        if self.name != "auto":
            return RULES[self.name]
        configured = {pattern: RULES[name] for pattern, name in self.sources.items()}
        for table in (configured, _KNOWN_SOURCES):
            if data_source in table:
                return table[data_source]
            rules = [rule for pattern, rule in table.items() if fnmatchcase(data_source, pattern)]
            if rules:
                return rules[0]
        return None
