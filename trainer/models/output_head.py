"""How a causal language model turns hidden states into logits, measured by calling its own code.

All families multiply by a matrix, and many do more: add a bias (Phi), scale the logits (Granite, Cohere) or the hidden
states (MiniCPM), or cap the logits softly (Gemma 2). The forward passes of the decoder and of the matrix are replaced
for one call, so the call needs no weights and costs nothing.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from trainer.errors import DataError


class OutputHead(NamedTuple):
    """logits = cap tanh(scale z / cap) with z = W (hidden_scale h) + b, or scale z if `cap` is None."""

    hidden_scale: float = 1.0
    scale: float = 1.0
    cap: float | None = None

    def logits(self, outputs: Tensor) -> Tensor:
        """The logits for outputs z of the matrix; any shape."""
        scaled = outputs * self.scale
        return scaled if self.cap is None else self.cap * torch.tanh(scaled / self.cap)

    def slope(self, logits: Tensor) -> Tensor | float:
        """The derivative of the logits with respect to z, given the logits."""
        return self.scale if self.cap is None else self.scale * (1 - (logits / self.cap).square())

    def tempered(self, temperature: float) -> Self:
        """The head whose logits are divided by the temperature."""
        return self._replace(scale=self.scale / temperature, cap=None if self.cap is None else self.cap / temperature)


PLAIN = OutputHead()


class _DecoderOutput(BaseModelOutputWithPast):  # type: ignore[misc]
    """What a decoder returns. Fields that only some families read are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def output_head(language_model: nn.Module) -> OutputHead:
    """The head of a Transformers causal language model, whose weights may be on any device, `meta` included.

    Raises DataError if its logits are not of the form that OutputHead describes.
    """
    decoder, matrix = language_model.get_decoder(), language_model.get_output_embeddings()
    family = language_model.config.model_type
    if not isinstance(matrix, nn.Linear) or decoder in (language_model, matrix):
        raise _unknown(family, "its output layer is no matrix")
    # Small, moderate and huge inputs: they tell a scale from a cap.
    z = torch.zeros(1, 1, matrix.out_features, dtype=torch.float64)
    sizes = torch.tensor([1.0, -1.0, 0.01, 3.0, -20.0, 50.0, 1e30], dtype=torch.float64)
    z[..., : len(sizes)] = sizes[: z.shape[-1]]
    entering: list[Tensor] = []

    def multiplied(hidden: Tensor) -> Tensor:
        entering.append(hidden)
        return z.clone()

    hidden = torch.ones(1, 1, matrix.in_features)
    decoded = _DecoderOutput(last_hidden_state=hidden)
    with torch.no_grad(), _replaced(decoder, lambda *_, **__: decoded), _replaced(matrix, multiplied):
        logits = language_model(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False).logits.double()
    if len(entering) != 1 or entering[0].shape != hidden.shape or logits.shape != z.shape:
        raise _unknown(family, "its output layer does not read the decoder's hidden states alone")
    hidden_scale = float(entering[0].flatten()[0])
    head = _fitted(hidden_scale, logits.flatten())
    known = torch.allclose(entering[0], hidden_scale * hidden) and torch.allclose(
        logits, head.logits(z), rtol=1e-5, atol=1e-6
    )
    if not known:
        raise _unknown(family, "its logits are neither scaled nor softly capped outputs of a matrix")
    return head


def _fitted(hidden_scale: float, logits: Tensor) -> OutputHead:
    unit, huge = float(logits[0]), float(logits[6])
    if not math.isfinite(huge) or abs(huge) > 1e20:
        return OutputHead(hidden_scale, scale=unit)
    return OutputHead(hidden_scale, scale=huge * math.atanh(unit / huge) if 0 < unit < huge else unit, cap=huge)


@contextmanager
def _replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replaces a module's forward pass while the block runs."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def _unknown(family: str, reason: str) -> DataError:
    return DataError(
        f"log-probs of {family} models cannot be computed: {reason}",
        hint="use another model family, such as Qwen3, Llama, Mistral, Gemma or Granite",
    )
