"""The policy and value networks. Both compute on packed rows and return one number per response token."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.errors import DataError
from trainer.models import attention
from trainer.models.linear_log_probs import linear_log_probs
from trainer.models.packing import PackedRows

# Number of logits in one chunk. Large matrix products are efficient on GPUs; 2^29 numbers in bfloat16 are 1 GiB.
LOGITS_PER_CHUNK = {"cuda": 2**29, "cpu": 2**26}


class PolicyNetwork(nn.Module):  # type: ignore[misc]
    """A causal language model that returns log-probs and entropy of response tokens instead of logits."""

    def __init__(self, language_model: nn.Module, temperature: float) -> None:
        super().__init__()
        self.language_model = with_packed_attention(language_model)
        self.temperature = temperature
        self.tokens_per_chunk: int | None = None  # as many as LOGITS_PER_CHUNK allows

    @property
    def decoder(self) -> nn.Module:
        return self.language_model.get_decoder()

    def forward(self, rows: PackedRows) -> tuple[Tensor, Tensor]:
        """Log-probs and entropy, both [rows, response length] float32 and 0 where masked.

        A pass without gradients needs no entropy and returns 0 for it.
        """
        hidden = decode(self.decoder, rows)
        weight = self.language_model.get_output_embeddings().weight
        chunk = self.tokens_per_chunk or max(1, LOGITS_PER_CHUNK[hidden.device.type] // weight.shape[0])
        log_probs, entropy = linear_log_probs(
            hidden, weight, rows.targets, self.temperature, chunk, with_entropy=torch.is_grad_enabled()
        )
        return rows.unpack(log_probs), rows.unpack(entropy)


class ValueNetwork(nn.Module):  # type: ignore[misc]
    """The body of a causal language model with a head that estimates the value of the state before each response token.

    The head starts at zero, so the first advantages come from the rewards and not from a random head.
    """

    def __init__(self, language_model: nn.Module) -> None:
        super().__init__()
        self.body = with_packed_attention(language_model).get_decoder()
        self.head = nn.Linear(language_model.config.hidden_size, 1, bias=False, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)

    @property
    def decoder(self) -> nn.Module:
        return self.body

    def forward(self, rows: PackedRows) -> Tensor:
        """Values, [rows, response length] float32 and 0 where masked."""
        # Float32, because bfloat16 rounds values near 1 to steps of 1/128.
        values = nn.functional.linear(decode(self.body, rows).float(), self.head.weight.float())
        return rows.unpack(values.squeeze(-1))


def decode(decoder: nn.Module, rows: PackedRows) -> Tensor:
    """The hidden states that predict the response tokens, [response tokens, width]."""
    output = decoder(
        input_ids=rows.token_ids, position_ids=rows.positions, use_cache=False, **rows.attention_arguments()
    )
    return output.last_hidden_state.squeeze(0)[rows.predicting]


def with_packed_attention(language_model: nn.Module) -> nn.Module:
    """Switches the model to packed attention, in place, and returns it."""
    language_model.set_attn_implementation(attention.NAME)
    return language_model


def load_language_model(path: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A Transformers causal language model on CPU. Raises DataError if there is none at `path`."""
    with _explained_failure(path):
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)


def empty_language_model(path: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same model on the device `meta`, without memory for its weights. Raises DataError."""
    with _explained_failure(path), torch.device("meta"):
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@contextmanager
def _explained_failure(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{path}: Transformers cannot load this model: {error}",
            hint="name a directory with config.json and *.safetensors that every node can read",
        ) from error
