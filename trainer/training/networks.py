"""The two networks that are trained, both computing on response tokens only."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from trainer.algorithms.log_probs import log_probs_and_entropy
from trainer.errors import DataError

# Logits of one chunk: 2^26 float32 numbers are 256 MiB.
LOGITS_PER_CHUNK = 2**26


class PolicyNetwork(nn.Module):  # type: ignore[misc]
    """A causal language model that gives log-probs and entropy of response tokens instead of logits."""

    def __init__(self, language_model: nn.Module, temperature: float) -> None:
        super().__init__()
        self.language_model = language_model
        self.temperature = temperature
        vocabulary = language_model.get_output_embeddings().weight.shape[0]
        self.tokens_per_chunk = max(1, LOGITS_PER_CHUNK // vocabulary)

    @property
    def layers(self) -> nn.ModuleList:
        return decoder_layers(self.language_model.get_decoder())

    def forward(self, token_ids: Tensor, prompt_lengths: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs and entropy, both [rows, response length] float32 and 0 where masked; arguments as in `Batch`."""
        positions = predicting_positions(prompt_lengths, response_mask, token_ids.shape[1])
        hidden = self.language_model.get_decoder()(input_ids=token_ids, use_cache=False).last_hidden_state
        hidden = take_tokens(hidden, positions)[response_mask]
        targets = token_ids.gather(1, (positions + 1).clamp_max(token_ids.shape[1] - 1))[response_mask]
        log_probs, entropy = zip(*self._chunks(hidden, targets), strict=True)
        return _scatter(torch.cat(log_probs), response_mask), _scatter(torch.cat(entropy), response_mask)

    def _chunks(self, hidden: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Chunk by chunk, recomputed in the backward pass: the logits of all tokens at once never exist."""
        head = self._head
        if torch.is_grad_enabled():
            head = partial(checkpoint, self._head, use_reentrant=False)
        for chunk, tokens in zip(
            hidden.split(self.tokens_per_chunk), targets.split(self.tokens_per_chunk), strict=True
        ):
            yield head(chunk, tokens)

    def _head(self, hidden: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.language_model.get_output_embeddings()(hidden)
        return log_probs_and_entropy(logits, token_ids, self.temperature)


class ValueNetwork(nn.Module):  # type: ignore[misc]
    """The body of a causal language model with a head that values the state before each response token.

    The head starts at zero: the first advantages are then the rewards, not the noise of a random head.
    """

    def __init__(self, language_model: nn.Module) -> None:
        super().__init__()
        self.body = language_model.get_decoder()
        self.head = nn.Linear(language_model.config.hidden_size, 1, bias=False, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)

    @property
    def layers(self) -> nn.ModuleList:
        return decoder_layers(self.body)

    def forward(self, token_ids: Tensor, prompt_lengths: Tensor, response_mask: Tensor) -> Tensor:
        """Values, [rows, response length] float32 and 0 where masked; arguments as in `Batch`."""
        positions = predicting_positions(prompt_lengths, response_mask, token_ids.shape[1])
        hidden = self.body(input_ids=token_ids, use_cache=False).last_hidden_state
        values = self.head(take_tokens(hidden, positions)).squeeze(-1)
        return values.float().where(response_mask, 0.0)


def load_language_model(path: Path) -> nn.Module:
    """A Transformers causal language model in float32, on CPU. Raises DataError if there is none at `path`."""
    try:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{path}: no model that Transformers can load: {error}",
            hint="name a directory with config.json and *.safetensors that every node can read",
        ) from error


def decoder_layers(decoder: Any) -> nn.ModuleList:
    """The list of transformer layers, the units of sharding. Raises DataError for a model without one."""
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise DataError(
            f"{type(decoder).__name__} has no list of layers to shard",
            hint="use a decoder-only model such as Qwen2, Llama or Mistral",
        )
    return layers


def predicting_positions(prompt_lengths: Tensor, response_mask: Tensor, length: int) -> Tensor:
    """Where each response token is predicted, the position before it: [rows, response length] int64, within the row."""
    columns = torch.arange(response_mask.shape[1], device=response_mask.device)
    return (prompt_lengths.unsqueeze(1) - 1 + columns).clamp_max(length - 1)


def take_tokens(hidden: Tensor, positions: Tensor) -> Tensor:
    """hidden [rows, length, width] at positions [rows, tokens]: [rows, tokens, width]."""
    return hidden.gather(1, positions.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))


def _scatter(values: Tensor, mask: Tensor) -> Tensor:
    """values [unmasked tokens] back at their places in `mask`, 0 elsewhere."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)
