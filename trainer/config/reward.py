"""The settings of the reward: the rule or the user's function, and a reward model."""

from functools import partial
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from trainer.config.custom_code import CustomCode
from trainer.config.section import ModelPath, Section, with_parameters
from trainer.rows import RewardRule, find_rows

RULES = find_rows("trainer.rewards.rules", RewardRule)
if TYPE_CHECKING:
    RuleName = str
else:
    RuleName = Literal[tuple(RULES)]


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


@partial(with_parameters, tables=(RULES,))
class RewardConfig(Section):
    name: RuleName = Field("gsm8k", description="rule that scores a response: trainer/rewards/rules/")
    weight: float = Field(
        1.0, description="weight of the score of the rule or function; 0: only the reward model scores"
    )
    model: RewardModelConfig = RewardModelConfig()
    custom_function: CustomCode = Field(
        CustomCode(),
        description="function (data_source, solution_str, ground_truth, extra_info) -> score",
    )
    processes: int | None = Field(
        None,
        gt=0,
        description="processes per node for custom_function and rules that may hang; one per core when not given",
    )
    timeout: float = Field(10.0, gt=0, description="seconds after which a reward counts as failed")
    failure_score: float = Field(0.0, description="score of a response whose reward raised or timed out")
    overlong_buffer: int = Field(
        0, ge=0, description="tokens before data.max_response_length from which a response is penalised (DAPO); 0: none"
    )
    overlong_penalty: float = Field(1.0, ge=0, description="penalty of a response of data.max_response_length tokens")

    @model_validator(mode="after")
    def _rule_has_its_parameters(self) -> Self:
        own = RULES[self.name].parameters
        for parameter in own:
            if getattr(self, parameter) is None:
                raise ValueError(f"reward.name={self.name} needs reward.{parameter}")
        for rule in RULES.values():
            for parameter in rule.parameters.keys() - own.keys():
                if getattr(self, parameter) != rule.parameters[parameter].default:
                    raise ValueError(f"reward.{parameter} belongs to reward.name={rule.name}, not to {self.name}")
        return self

    @model_validator(mode="after")
    def _something_scores(self) -> Self:
        if self.weight == 0 and self.model.path is None:
            raise ValueError("reward.weight=0 leaves nothing to score with: set reward.model.path")
        return self
