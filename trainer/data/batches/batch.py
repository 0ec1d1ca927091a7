"""The batch of one step's responses, which the controller and the ranks exchange."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, chain
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from trainer.data.batches.copies import to_device
from trainer.data.batches.routes import Routes
from trainer.data.batches.shared_prompts import SharedPrompts


@dataclass(frozen=True)
class Shard:
    """The rows of one data group: their indices in the batch, [rows] int64, those of the first mini-batch first, and
    how many each mini-batch has."""

    rows: Tensor
    sizes: Sequence[int]


@dataclass(frozen=True)
class Batch:
    """One row per response: the prompt, directly followed by the response, padded with 0 on the *right* only.

    Under a causal mask no token sees the padding after it, so the models need neither an attention mask nor positions.
    Tensors of response tokens start with the response: column t is token t of the response.

    Shapes: `token_ids` [rows, length] int64; `prompt_lengths` [rows] int64; `response_mask` [rows, response length]
    bool; `counted` [rows] bool; all others [rows, response length] float32, 0 where masked, and None until their phase
    has run. `routes` are the experts to choose, where a pass is to repeat the choices of another.
    """

    token_ids: Tensor
    prompt_lengths: Tensor
    response_mask: Tensor
    rollout_log_probs: Tensor | None = None
    old_log_probs: Tensor | None = None
    reference_log_probs: Tensor | None = None
    teacher_log_probs: Tensor | None = None
    squared_probabilities: Tensor | None = None  # summed over the vocabulary
    values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    corrections: Tensor | None = None  # weight of each token's policy loss
    counted: Tensor | None = None  # rows by which losses divide; None: all
    routes: Routes | None = None

    @classmethod
    def from_responses(
        cls,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        log_probs: Sequence[Sequence[float]] | None,
        masks: Sequence[Sequence[bool]] | None = None,
    ) -> Self:
        """Builds a batch from prompts and responses (token ids) and the engine's log-prob of each response token.

        `masks` mark the response tokens that the policy sampled; None marks all. The last token must be marked.
        """
        masks = masks or [[True] * len(response) for response in responses]
        prompt_lengths, lengths = (np.array([len(row) for row in rows]) for rows in (prompts, responses))
        tokens = chain.from_iterable(chain.from_iterable(zip(prompts, responses, strict=True)))
        return cls(
            token_ids=_pad(tokens, prompt_lengths + lengths, np.int64),
            prompt_lengths=torch.from_numpy(prompt_lengths),
            response_mask=_pad(chain.from_iterable(masks), lengths, np.bool_),
            rollout_log_probs=None if log_probs is None else _pad(chain.from_iterable(log_probs), lengths, np.float32),
        )

    def __len__(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def responses(self) -> int:
        """The number of rows by which losses that are means over responses divide."""
        return len(self) if self.counted is None else int(self.counted.sum())

    @property
    def lengths(self) -> Tensor:
        """The number of tokens in each row without padding, [rows] int64."""
        # With 64-bit columns the product takes six times as long.
        columns = torch.arange(1, self.response_mask.shape[1] + 1, device=self.response_mask.device, dtype=torch.int32)
        return self.prompt_lengths + (self.response_mask * columns).amax(dim=1)

    def with_(self, **fields: Tensor | Routes | None) -> Self:
        """The same rows with these fields added or replaced."""
        return replace(self, **fields)

    def with_only(self, *names: str) -> Self:
        """The same rows with only the named fields besides tokens, prompt lengths and mask, to send less data."""
        kept = {name: getattr(self, name) for name in names}
        return type(self)(self.token_ids, self.prompt_lengths, self.response_mask, **kept)

    def rows(self, index: slice | Tensor) -> Self:
        """The selected rows, without columns of `token_ids` that are padding in all of them."""
        chosen = self._map(lambda tensor: tensor[index])
        if self.routes is not None:
            chosen = replace(chosen, routes=self.routes.rows(torch.arange(len(self))[index].tolist()))
        return replace(chosen, token_ids=chosen.token_ids[:, : max(chosen.lengths.tolist(), default=0)])

    def masked_row(self) -> Self:
        """A row of one token with these tensors and an empty response mask, so that it adds 0 to a loss."""
        zeros = self._map(lambda tensor: tensor.new_zeros(1, *tensor.shape[1:]))
        zeros = replace(zeros, routes=None if self.routes is None else Routes([[]]))
        return replace(zeros, token_ids=zeros.token_ids.new_zeros(1, 1), prompt_lengths=zeros.prompt_lengths + 1)

    def to(self, device: torch.device) -> Self:
        return self._map(lambda tensor: to_device(tensor, device))

    def split(self, sizes: Sequence[int]) -> Iterator[Self]:
        """Consecutive parts of so many rows each."""
        for end, size in zip(accumulate(sizes), sizes, strict=True):
            yield self.rows(slice(end - size, end))

    def shards(self, count: int, mini_batch_size: int | None = None) -> list[Shard]:
        """The rows of each data group, of which there are `count`: nearly equally many rows and tokens.

        Rows with the same prompt stay together where that leaves the heaviest group less work. A mini-batch is that
        many consecutive rows, all of them without a size; so each optimizer step uses the same responses for any
        number of groups. If its rows do not divide, some groups have fewer than others, maybe none.
        """
        size = mini_batch_size or len(self)
        starts = range(0, len(self), size)
        mini_batches = [self.rows(slice(start, start + size)).shared_prompts().shards(count) for start in starts]
        return [
            Shard(
                torch.tensor(
                    [s + row for s, part in zip(starts, parts, strict=True) for row in part], dtype=torch.int64
                ),
                [len(part) for part in parts],
            )
            for parts in zip(*mini_batches, strict=True)
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles tensors as arrays. Ray copies the bytes of an array once, but those of a tensor twice."""
        return _from_arrays, ({name: tensor.numpy() for name, tensor in self.tensors().items()}, self.routes)

    def shared_prompts(self) -> SharedPrompts:
        """The rows of each prompt, in the order of their first rows. The batch must be on CPU."""
        groups: dict[bytes, list[int]] = {}
        token_ids, prompt_lengths = self.token_ids.numpy(), self.prompt_lengths.tolist()
        for row, length in enumerate(prompt_lengths):
            groups.setdefault(token_ids[row, :length].tobytes(), []).append(row)
        return SharedPrompts(list(groups.values()), self.lengths.tolist(), prompt_lengths)

    def tensors(self) -> dict[str, Tensor]:
        """The present tensors, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in values.items() if isinstance(tensor, Tensor)}

    def _map(self, function: Any) -> Self:
        return replace(self, **{name: function(tensor) for name, tensor in self.tensors().items()})


def _from_arrays(arrays: Mapping[str, np.ndarray], routes: Routes | None) -> Batch:
    """Copies the arrays, because Ray's are in read-only shared memory."""
    return Batch(**{name: torch.from_numpy(array.copy()) for name, array in arrays.items()}, routes=routes)


def _pad(values: Iterator[Any], lengths: np.ndarray, dtype: type[np.generic]) -> Tensor:
    """Splits a flat sequence of values into rows padded with 0, [rows, longest]."""
    padded = np.zeros((len(lengths), lengths.max()), dtype)
    padded[np.arange(lengths.max()) < lengths[:, None]] = np.fromiter(values, dtype, lengths.sum())
    return torch.from_numpy(padded)
