"""Row types of the algorithms: advantage estimators, policy losses and corrections."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Self

from trainer.algorithms.losses.aggregation import Aggregation
from trainer.rows import Row

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Sampled:
    """Input of an estimator: the scored responses of a step.

    Shapes: `rewards` [rows, tokens] float64, 0 where the policy did not choose the token, and already moved by
    `on_trained_tokens`; `mask` [rows, tokens] bool, the tokens that train; `groups` [rows] int64, equal for the
    responses to one prompt. `values` [rows, tokens] exist only for an estimator that needs a critic, `greedy_scores`
    [rows] only for one that needs greedy responses, and `squared_probabilities` [rows, tokens], summed over the
    vocabulary, only for one that needs them. `log_probs` [rows, tokens] are those of the policy before the update, None
    if no pass has computed them; `weights` [rows, tokens] are those of a correction, if any. `components` holds each
    named number of the rewards, [rows], for an estimator that needs them.
    """

    rewards: Tensor
    mask: Tensor
    groups: Tensor
    values: Tensor | None = None
    greedy_scores: Tensor | None = None
    log_probs: Tensor | None = None
    squared_probabilities: Tensor | None = None
    weights: Tensor | None = None
    components: Mapping[str, Tensor] = field(default_factory=dict)

    def rows(self, index: Tensor) -> Self:
        """The selected rows; `index` is [rows] bool."""
        tensors = {name: value for name, value in vars(self).items() if name != "components" and value is not None}
        return replace(
            self,
            **{name: tensor[index] for name, tensor in tensors.items()},
            components={name: numbers[index] for name, numbers in self.components.items()},
        )


class Advantages(NamedTuple):
    """Both [rows, tokens]; `returns` are the critic's targets, None without a critic."""

    advantages: Tensor
    returns: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Estimator(Row):
    """An advantage estimator in `trainer/algorithms/advantages/`.

    `estimate(sampled, **parameters)` returns the advantages; its parameters are settings of the section `algorithm`.
    With `compares_groups`, a response is compared with others to the same prompt; `smallest_group` is the least number
    of responses for which that works.
    """

    estimate: Callable[..., Advantages]
    needs_critic: bool = False
    compares_groups: bool = False
    smallest_group: int = 1
    needs_greedy_responses: bool = False
    needs_squared_probabilities: bool = False
    needs_components: bool = False


class TokenLoss(NamedTuple):
    """Loss of each token, and whether clipping removed its gradient or bounded its weight. Both [rows, tokens]."""

    loss: Tensor
    clipped: Tensor


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(Row):
    """A policy loss in `trainer/algorithms/policy_losses/`.

    `loss(log_probs, old_log_probs, advantages, mask, **parameters)` returns a `TokenLoss`; every tensor is
    [rows, tokens]. Its parameters are settings of the section `actor`.

    Without `uses_ratio`, the loss is that of a policy that learns from its own samples. `aggregation` replaces
    `actor.loss_aggregation` for a loss that is defined for one aggregation only. With `sequence_level`, every token has
    the loss of its response, and a correction enters as its geometric mean over the response. With `per_micro_batch`,
    the loss of a token depends on the other rows of its micro-batch.
    """

    loss: Callable[..., TokenLoss]
    uses_ratio: bool = True
    aggregation: Aggregation | None = None
    sequence_level: bool = False
    per_micro_batch: bool = False


@dataclass(frozen=True, kw_only=True)
class Correction(Row):
    """A correction in `trainer/algorithms/corrections/`.

    `weights(ratio, mask, **parameters)` returns the weight of each token's loss, [rows, tokens]. Its parameters are
    settings of the section `algorithm`. With `sequence_level`, all tokens of a response share a weight. Inside its
    bounds a weight is the ratio of the token or the response; with `masks_only` it is 1.
    """

    weights: Callable[..., Tensor]
    sequence_level: bool = False
    masks_only: bool = False


@dataclass(frozen=True)
class Pairs:
    """Preference pairs: the log-prob of each response under the policy less that under the reference, and its tokens.

    Shapes: all [pairs]; `chosen` and `rejected` are sums over tokens.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_lengths: Tensor
    rejected_lengths: Tensor

    @property
    def margins(self) -> Tensor:
        """How much more the policy prefers the chosen response than the reference does, [pairs]."""
        return self.chosen - self.rejected


@dataclass(frozen=True, kw_only=True)
class PreferenceLoss(Row):
    """A loss of preference pairs in `trainer/algorithms/preference_losses/`.

    `loss(pairs, beta, **parameters)` returns the loss of each pair, [pairs]. Its parameters are settings of the section
    `dpo`.
    """

    loss: Callable[..., Tensor]


@dataclass(frozen=True)
class Labelled:
    """Responses with labels: `ratios` is the log-prob of each under the policy less that under the reference.

    Shapes: `ratios` and `desirable` (bool) are [rows]. `kl` estimates the KL between policy and reference.
    """

    ratios: Tensor
    desirable: Tensor
    kl: float = 0.0


@dataclass(frozen=True, kw_only=True)
class UnpairedLoss(Row):
    """A loss of labelled responses in `trainer/algorithms/unpaired_losses/`.

    `loss(responses, beta, **parameters)` returns the loss of each response, [rows], before the weights of desirable and
    undesirable ones. Its parameters are settings of the section `kto`. With `needs_kl`, the KL is estimated for it.
    """

    loss: Callable[..., Tensor]
    needs_kl: bool = False
