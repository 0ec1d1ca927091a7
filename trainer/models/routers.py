"""The routers of a network's expert layers: the experts that each token chose, and the weights of their outputs.

A router makes a logit per expert, chooses some experts, and weighs their outputs. Families differ in how they choose
(groups, correcting biases), but in few ways in how logits become weights. That rule is found by calling the family's
own router. With it, other choices can take the place of the router's own (router replay, Ma et al. 2025,
arXiv:2510.11370), and keep the gradient of their weights.
"""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from trainer.errors import DataError
from trainer.models.context_parallel import ContextGroup
from trainer.models.packing import PackedRows, known_routes

# Tokens with which a family's rule is found.
PROBED = 64


class RouterRule(NamedTuple):
    """weights = scale * s / (sum of the chosen s), without the division unless `normalized`.

    s are the softmax of all logits, that of the chosen logits alone, or the sigmoid.
    """

    scores: Literal["softmax", "softmax of chosen", "sigmoid"]
    normalized: bool = False
    scale: float = 1.0

    def weights(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """The weights of the chosen experts, [tokens, choices] float32; `logits` [tokens, experts]."""
        logits = logits.float()
        match self.scores:
            case "softmax":
                scores = logits.softmax(dim=-1).gather(1, chosen)
            case "softmax of chosen":
                scores = logits.gather(1, chosen).softmax(dim=-1)
            case "sigmoid":
                scores = logits.sigmoid().gather(1, chosen)
        if self.normalized:
            scores = scores / scores.sum(dim=-1, keepdim=True)
        return scores * self.scale

    def probabilities(self, logits: Tensor) -> Tensor:
        """The scores of all experts, with the sum 1, [tokens, experts] float32."""
        if self.scores == "sigmoid":
            scores = logits.float().sigmoid()
            return scores / scores.sum(dim=-1, keepdim=True)
        return logits.float().softmax(dim=-1)


class RouterLosses(NamedTuple):
    """The losses that balance the load of experts, or their weights. Each is a mean over responses and a sum over
    layers, so that it does not depend on how responses are divided among ranks and micro-batches.

    aux: E sum_e f_e P_e of a response, with f_e the share of its choices that are expert e of E, and P_e the mean over
    its tokens of the expert's probability; 1 if balanced (DeepSeek-V3, arXiv:2412.19437, section 2.1.2). z: the mean
    over its tokens of the squared logarithm of the sum of exp(logits) (Zoph et al. 2022, arXiv:2202.08906). Tokens are
    those that predict a token of the response.
    """

    aux: float
    z: float


# The first that fits is taken. Some are equal but for rounding, and the family's own is the one without a difference.
RULES = (
    RouterRule("softmax of chosen"),
    *(RouterRule("softmax", normalized) for normalized in (True, False)),
    *(RouterRule("sigmoid", normalized) for normalized in (True, False)),
)


class Routers:
    """All routers of a network, in the order of its layers, and what they do in one pass.

    Experts are counted from 0. `rule` is None for dense models, and for families that no rule fits: their routers stay
    as they are. Call `begin` before each pass.
    """

    def __init__(self, decoder: nn.Module, is_packed: bool = True) -> None:
        pairs = list(routers_and_blocks(decoder))
        self.layers = len(pairs)
        self.has_experts = any(True for _ in _expert_blocks(decoder))
        self.rule = _common_rule(pairs)
        self._rows: PackedRows | None = None
        self._in_pass = False
        self._context: ContextGroup | None = None
        # The weight of each loss that balances, and the factor of a response's share of it in an update.
        self.coefficients = RouterLosses(0.0, 0.0)
        self._factor: float | None = None
        self._chosen: list[Tensor] = []
        self._given: Tensor | None = None
        if self.rule is None:
            return
        self.experts = int(pairs[0][0].weight.shape[0])
        self._padded = not is_packed
        for layer, (router, _) in enumerate(pairs):
            router.register_forward_hook(partial(self._routed, layer))

    def begin(self, rows: PackedRows | None = None, context: ContextGroup | None = None) -> None:
        """The next pass is over these rows, or this rank's share of them, and takes the choices that they bring.

        Without rows it is over any tokens, which choose by themselves.
        """
        if self.rule is None:
            assert rows is None or rows.routes is None, "choices are given to routers without a known rule"
            return
        self._rows, self._context, self._in_pass = rows, context, True
        self._chosen = [torch.empty(0)] * self.layers
        self._losses = [torch.zeros(2)] * self.layers
        self._given = None if rows is None else rows.routes
        if self._given is not None and self._padded:
            assert rows is not None
            self._given = rows.padded(self._given, fill=torch.iinfo(self._given.dtype).max).flatten(0, 1)

    @contextmanager
    def updating(self, responses: int, factor: float) -> Iterator["RouterRecord"]:
        """Passes inside are those of a mini-batch with so many responses, over all ranks; yields what to measure with.

        Losses that balance add their gradients, multiplied by `factor`.
        """
        assert self.rule is not None or not any(self.coefficients), "losses of routers without a known rule"
        self._factor = factor / max(1, responses) if any(self.coefficients) else None
        try:
            yield RouterRecord(self, responses)
        finally:
            self._factor = None

    # Layers are compiled once for all, but this reads the number of its own.
    @torch.compiler.disable
    def _routed(
        self, layer: int, _router: nn.Module, _arguments: Any, routed: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """The logits, weights and choices of a router, [tokens, ...], with the choices that were given."""
        logits, weights, chosen = routed
        if not self._in_pass:  # called to compile its layer
            return None
        assert self.rule is not None
        if self._given is not None:
            given = self._given[:, layer]
            chosen = torch.where(known_routes(given), given.long(), chosen)
            weights = self.rule.weights(logits, chosen).to(weights.dtype)
        self._chosen[layer] = chosen
        if self._factor is not None and torch.is_grad_enabled():
            losses = self.losses_of(logits, chosen)
            self._losses[layer] = losses.detach()
            loss = (losses * losses.new_tensor(self.coefficients)).sum()
            weights = _WithLoss.apply(weights, loss, self._factor)
        return logits, weights, chosen

    def losses_of(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """The two losses of a layer, see `RouterLosses`: summed over responses, as far as their tokens are this rank's.

        `logits` [tokens, experts], `chosen` [tokens, choices]; returns [2] float32.
        """
        assert self._rows is not None
        assert self.rule is not None
        predicting, row = self._rows.predicting, self._rows.places // self._rows.response_shape[1]
        logits, chosen = self._in_line(logits)[predicting].float(), self._in_line(chosen)[predicting]
        counts = logits.new_zeros(self._rows.response_shape[0], self.experts)
        counts = counts.index_put((row.unsqueeze(1), chosen), counts.new_ones(()), accumulate=True)
        if self._context is not None:
            counts = self._context.add_up(counts)
        choices = counts.sum(dim=1, keepdim=True).clamp(min=1)
        shares, tokens = (counts / choices)[row], choices[row].squeeze(1) / chosen.shape[1]
        balance = self.experts * (shares * self.rule.probabilities(logits)).sum(dim=1)
        return torch.stack([(loss / tokens).sum() for loss in (balance, logits.logsumexp(dim=1).square())])

    def chosen(self) -> Tensor:
        """The experts that each token of the line, or of this rank's share, chose in the pass: [tokens, layers,
        choices] int64. Without rows, of each token that the network was given."""
        return self._in_line(torch.stack(self._chosen, dim=1))

    def losses(self) -> Tensor:
        """What `losses_of` found in the pass, mean over layers, [2] float32."""
        return torch.stack(self._losses).mean(dim=0)

    def _in_line(self, of_tokens: Tensor) -> Tensor:
        """What the tokens of the line have, from what those that a router was given have."""
        if self._rows is None or not self._padded:
            return of_tokens
        return self._rows.in_line(of_tokens.unflatten(0, (-1, self._rows.longest)))

    def loads(self) -> Tensor:
        """How many of the response tokens' predictions each expert took part in, [layers, experts] int64."""
        assert self._rows is not None
        predicting = self.chosen()[self._rows.predicting].flatten(2)  # [response tokens, layers, choices]
        loads = predicting.new_zeros(self.layers, self.experts)
        by_layer = predicting.transpose(0, 1).flatten(1)
        return loads.scatter_add_(1, by_layer, torch.ones_like(by_layer))


class RouterRecord:
    """What routers did in the passes of a mini-batch."""

    def __init__(self, routers: Routers, responses: int) -> None:
        self._routers, self._responses = routers, responses
        self._loads: list[Tensor] = []
        self._losses: list[Tensor] = []

    def count_pass(self) -> None:
        """Adds the last pass."""
        if self._routers.rule is not None:
            self._loads.append(self._routers.loads())
            self._losses.append(self._routers.losses())

    def metrics(self, reduced: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """How unequal the loads of experts are, and the losses that have a weight, before it: mean over responses and
        layers. `reduced` adds up a tensor on CPU over all ranks, each of which has other tokens."""
        if self._routers.rule is None:
            return {}
        loads = reduced(torch.stack(self._loads).sum(dim=0).cpu())
        losses = reduced(torch.stack(self._losses).sum(dim=0).double().cpu()) / max(1, self._responses)
        values = {"expert_load": imbalance(loads)[0], "expert_load_max": imbalance(loads)[1]}
        names = ("router_aux_loss", "router_z_loss")
        weighted = zip(names, losses.tolist(), self._routers.coefficients, strict=True)
        return values | {name: loss for name, loss, coefficient in weighted if coefficient}


def imbalance(loads: Tensor) -> tuple[float, float]:
    """The load of each layer's busiest expert over the mean of all its experts: the mean and the largest over layers.

    `loads` [layers, experts].
    """
    largest = loads.amax(dim=1) / loads.double().mean(dim=1)
    return float(largest.mean()), float(largest.max())


class _WithLoss(torch.autograd.Function):  # type: ignore[misc]
    """Weights that bring the gradient of a loss, multiplied by a factor, into the backward pass.

    The loss of a layer must be differentiated while the layer is: only then are its weights gathered.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor, factor: float) -> Tensor:
        ctx.factor = loss.new_tensor(factor)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, ctx.factor, None


def _expert_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The modules with experts, in the order of their layers."""
    return (block for block in module.modules() if isinstance(getattr(block, "experts", None), nn.Module))


def routers_and_blocks(module: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Each router with the block of experts that it is part of: the block's child with a row of weights per expert."""
    for block in _expert_blocks(module):
        experts = next(block.experts.parameters(), torch.empty(0)).shape[0]
        for child in block.children():
            weight = getattr(child, "weight", None)
            if isinstance(weight, Tensor) and weight.dim() == 2 and weight.shape[0] == experts > 1:
                yield child, block


def _common_rule(pairs: list[tuple[nn.Module, nn.Module]]) -> RouterRule | None:
    """The rule of all routers; None without any, or if they have none in common."""
    rules = {_rule_of(*pair) for pair in pairs}
    return rules.pop() if len(rules) == 1 else None


def _rule_of(router: nn.Module, block: nn.Module) -> RouterRule | None:
    """The rule of a router, found by calling its own code with random weights; its own may be on any device."""
    try:
        logits, weights, chosen = _probe(router, block)
    except (TypeError, ValueError, AttributeError):  # it takes or returns something else
        return None
    if logits.dim() != 2 or weights.shape != chosen.shape or chosen.is_floating_point():
        return None
    fitting = []
    for rule in RULES:
        unscaled = rule.weights(logits, chosen)
        # A factor of a configuration has few digits.
        scaled = rule._replace(scale=float(f"{float(weights.sum() / unscaled.sum()):.6g}"))
        difference = float((scaled.weights(logits, chosen) - weights).abs().max())
        if difference <= 1e-5 * scaled.scale:
            fitting.append((difference, scaled))
    return min(fitting, key=lambda pair: pair[0])[1] if fitting else None


def _probe(router: nn.Module, block: nn.Module) -> Any:
    """What a copy of the router returns for random tokens in float32."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    copied = copy.deepcopy(router)
    copied._forward_hooks.clear()
    # In place of its own, which may be on meta or in files.
    tensors = {name: random(*tensor.shape) for name, tensor in chain(copied.named_parameters(), copied.named_buffers())}
    # Further arguments are tensors of the block, such as a bias that corrects the choice.
    _, *further = inspect.signature(router.forward).parameters
    arguments = [random(*getattr(block, name).shape) for name in further]
    with torch.no_grad():
        return functional_call(copied, tensors, (random(PROBED, router.weight.shape[1]), *arguments))


def check_routers(language_model: nn.Module, settings: list[str]) -> None:
    """Raises DataError if `settings`, which need the rule of a model's routers, are given for a model without.

    The weights may be on any device, `meta` included.
    """
    if not settings:
        return
    routers, family = Routers(language_model.get_decoder()), language_model.config.model_type
    if not routers.has_experts:
        raise DataError(f"{settings[0]}: {family} models have no experts", hint="leave it out")
    if routers.rule is None:
        raise DataError(
            f"{settings[0]}: how the routers of {family} models weigh experts is not known here",
            hint="leave it out, or use a family such as Qwen3-MoE, Mixtral, DeepSeek, GLM-4.5 or gpt-oss",
        )
