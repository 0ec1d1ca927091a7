"""The policy and value networks. Both compute on packed rows and return one number per response token."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trainer.errors import DataError
from trainer.models import attention
from trainer.models.context_parallel import ContextGroup
from trainer.models.exact.operators import Operators
from trainer.models.linear_log_probs import linear_log_probs, linear_squared_probabilities
from trainer.models.output_head import output_head
from trainer.models.packing import PackedRows
from trainer.models.routers import Routers

# Number of logits in one chunk. Large matrix products are efficient on GPUs; 2^29 numbers in bfloat16 are 1 GiB.
LOGITS_PER_CHUNK = {"cuda": 2**29, "cpu": 2**26}
# Transformers' names of the kinds of layers that `trainer.models.attention` computes.
ATTENTION_LAYERS = {"full_attention", "sliding_attention"}


class PolicyNetwork(nn.Module):  # type: ignore[misc]
    """A causal language model that returns log-probs and entropy of response tokens instead of logits."""

    def __init__(self, language_model: nn.Module, temperature: float) -> None:
        super().__init__()
        self.language_model = prepared(language_model)
        self.output_head = output_head(language_model)
        self.routers = Routers(self.decoder, is_packed(self.decoder))
        self.temperature = temperature
        self.tokens_per_chunk: int | None = None  # as many as LOGITS_PER_CHUNK allows
        self.operators: Operators | None = None  # of `trainer.models.exact`, if a backend sets them
        self.context: ContextGroup | None = None  # the ranks that compute the same rows together
        self._returns_squares = False

    @property
    def decoder(self) -> nn.Module:
        return self.language_model.get_decoder()

    def forward(self, rows: PackedRows) -> tuple[Tensor, Tensor]:
        """Log-probs and entropy, both [rows, response length] float32 and 0 where masked.

        A pass without gradients needs no entropy and returns 0 for it.
        """
        matrix = self.language_model.get_output_embeddings()
        weight = matrix.weight
        rows = own_share(rows, self.context)
        self.routers.begin(rows, self.context)
        hidden = decode(self.decoder, rows, self.context).to(weight.dtype)  # Mamba's last normalisation returns float32
        if self._returns_squares:
            arguments = (hidden, weight, self.temperature, self._chunk(weight), matrix.bias, self.output_head)
            squares = of_all_rows(linear_squared_probabilities(*arguments), rows, self.context)
            return squares, torch.zeros_like(squares)
        log_probs, entropy = self.predict(hidden, weight, matrix.bias, rows.targets)
        return of_all_rows(log_probs, rows, self.context), of_all_rows(entropy, rows, self.context)

    def predict(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs of the targets and entropy, both [tokens] float32, from hidden states [tokens, width] and the
        matrix of the head; a pass without gradients returns 0 for the entropy."""
        return linear_log_probs(
            *(hidden, weight, targets, self.temperature, self._chunk(weight)),
            with_entropy=torch.is_grad_enabled(),
            bias=bias,
            head=self.output_head,
            operators=self.operators,
        )

    def _chunk(self, weight: Tensor) -> int:
        return self.tokens_per_chunk or max(1, LOGITS_PER_CHUNK[weight.device.type] // weight.shape[0])

    @contextmanager
    def returning_squares(self) -> Iterator[None]:
        """Passes inside return the sum of the squared probabilities over the vocabulary in place of log-probs."""
        self._returns_squares = True
        try:
            yield
        finally:
            self._returns_squares = False


class ValueNetwork(nn.Module):  # type: ignore[misc]
    """The body of a causal language model with a head that estimates the value of the state before each response token.

    The caller sets the weights of the head. `dtype` is that of the other trained weights.
    """

    def __init__(self, language_model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.body = prepared(language_model).get_decoder()
        self.routers = Routers(self.body, is_packed(self.body))
        width = language_model.config.get_text_config().hidden_size
        self.head = nn.Linear(width, 1, bias=False, dtype=dtype)
        self.context: ContextGroup | None = None

    @property
    def decoder(self) -> nn.Module:
        return self.body

    def forward(self, rows: PackedRows) -> Tensor:
        """Values, [rows, response length] float32 and 0 where masked."""
        rows = own_share(rows, self.context)
        self.routers.begin(rows, self.context)
        # Float32, because bfloat16 rounds values near 1 to steps of 1/128.
        values = nn.functional.linear(decode(self.body, rows, self.context).float(), self.head.weight.float())
        return of_all_rows(values.squeeze(-1), rows, self.context)


def own_share(rows: PackedRows, context: ContextGroup | None) -> PackedRows:
    """The part of the rows that this rank computes."""
    return rows if context is None else rows.share(context.rank, context.size)


def of_all_rows(values: Tensor, rows: PackedRows, context: ContextGroup | None) -> Tensor:
    """Values of the own response tokens, [response tokens] -> those of all ranks, [rows, response length]."""
    values = rows.unpack(values)
    return values if context is None else context.total(values)


def decode(decoder: nn.Module, rows: PackedRows, context: ContextGroup | None) -> Tensor:
    """The hidden states that predict the response tokens, [response tokens, width]."""
    if not is_packed(decoder):
        # Padding on the right changes nothing: no token of a causal model depends on later ones.
        output = decoder(input_ids=rows.padded_token_ids(), use_cache=False)
        return rows.predicting_in_line(output.last_hidden_state)
    output = decoder(
        input_ids=rows.token_ids,
        position_ids=rows.positions,
        use_cache=False,
        context_group=context,
        **rows.attention_arguments(),
    )
    return output.last_hidden_state.squeeze(0)[rows.predicting]


def prepared(language_model: nn.Module) -> nn.Module:
    """Switches the model to packed attention, in place, if its rows can be packed, and returns it.

    Dropout stays off in training: the ratio of new to old log-probs would otherwise measure noise.
    """
    language_model.eval()
    if why_not_packed(language_model) is None:
        language_model.set_attn_implementation(attention.NAME)
    return language_model


def is_packed(model: nn.Module) -> bool:
    """Whether a prepared model, or its decoder, computes on packed rows; otherwise on rows padded to one length."""
    return bool(model.config._attn_implementation == attention.NAME)


def why_not_packed(language_model: nn.Module) -> str | None:
    """The reason why rows of a Transformers model cannot be packed; None if they can.

    Only attention can be kept within a row. A recurrent state or a convolution carries a row into the next one.
    """
    if language_model._is_stateful:
        return "its layers have a recurrent state"
    kinds = set(getattr(language_model.config.get_text_config(), "layer_types", None) or ())
    if others := sorted(kinds - ATTENTION_LAYERS):
        return f"it has layers of the kind {', '.join(others)}"
    if not language_model._supports_attention_backend:
        return "its attention cannot be replaced"
    return None


def check_context_parallel(language_model: nn.Module, role: str, ranks: int, split: int = 1) -> None:
    """Raises DataError if `ranks` ranks of a role cannot compute a model's rows together while `split` ranks split its
    matrices.

    The weights may be on any device, `meta` included.
    """
    if ranks == 1:
        return
    config = language_model.config.get_text_config()
    setting = f"{role}.sharding.context_parallel={ranks}: {config.model_type}"
    if (reason := why_not_packed(language_model)) is not None:
        raise DataError(
            f"{setting} models cannot be computed by several ranks together, because their rows cannot be packed: "
            f"{reason}",
            hint="set it to 1, or use a model whose layers are attention, such as Qwen3, Llama, Mistral or Gemma",
        )
    heads = config.num_attention_heads
    if heads % (ranks * split):
        fitting = [str(size) for size in range(1, heads + 1) if heads % (size * split) == 0]
        of_each = f" on each of sharding.tensor_parallel={split}" if split > 1 else ""
        raise DataError(
            f"{setting} models of this size have {heads // split} attention heads{of_each}, which it does not divide",
            hint=f"set it to one of {', '.join(fitting)}",
        )


def computation_notes(decoder: nn.Module) -> list[str]:
    """Notes on slower paths that this process took with a decoder."""
    family = decoder.config.model_type
    notes = []
    if not is_packed(decoder):
        notes.append(f"{family}: rows are padded to one length and not packed, because {why_not_packed(decoder)}")
    if used := sorted(attention.FORMULA_USED_FOR):
        notes.append(
            f"{family}: attention is computed from its formula, because FlashAttention has no {' and no '.join(used)}"
        )
    return notes
