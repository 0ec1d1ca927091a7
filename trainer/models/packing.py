"""Packed rows, the networks' input: the rows of a batch end to end, without padding."""

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from trainer.data.batches.batch import Batch
from trainer.data.batches.copies import to_device


@dataclass(frozen=True)
class PackedRows:
    """All tokens of some rows in one line.

    Shapes: `token_ids` and `positions` (within the row) [1, tokens] int64; `offsets` [sequences + 1] int32, the bounds
    of the rows; `predicting` [response tokens] int64, the index in the line that predicts each response token;
    `targets` [response tokens] int64, the response tokens; `places` [response tokens] int64, their indices in the
    flattened [rows, response length]. `longest` is the length of the longest row.
    """

    token_ids: Tensor
    positions: Tensor
    offsets: Tensor
    longest: int
    predicting: Tensor
    targets: Tensor
    places: Tensor
    response_shape: tuple[int, int]

    @classmethod
    def of(cls, batch: Batch, multiple: int = 1) -> Self:
        """Packs the rows of a batch on CPU.

        An unused sequence of zeros pads the line to a multiple of `multiple`, and `longest` is rounded up to one, so
        that code compiled or tuned per size sees few sizes.
        """
        lengths = batch.lengths
        columns = torch.arange(batch.token_ids.shape[1])
        inside = columns < lengths.unsqueeze(1)
        token_ids, positions = batch.token_ids[inside], columns.expand_as(inside)[inside]
        starts = lengths.cumsum(0) - lengths
        rows, columns = batch.response_mask.nonzero(as_tuple=True)
        in_row = batch.prompt_lengths[rows] + columns
        spare = -len(token_ids) % multiple
        sequences = torch.cat([lengths, torch.tensor([spare])]) if spare else lengths
        return cls(
            token_ids=torch.cat([token_ids, token_ids.new_zeros(spare)]).unsqueeze(0),
            positions=torch.cat([positions, torch.arange(spare)]).unsqueeze(0),
            offsets=torch.nn.functional.pad(sequences.cumsum(0), (1, 0)).to(torch.int32),
            longest=-(-int(sequences.max()) // multiple) * multiple,
            predicting=starts[rows] + in_row - 1,
            targets=batch.token_ids[rows, in_row],
            places=rows * batch.response_mask.shape[1] + columns,
            response_shape=(batch.response_mask.shape[0], batch.response_mask.shape[1]),
        )

    def to(self, device: torch.device) -> Self:
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{k: to_device(v, device) for k, v in tensors.items() if isinstance(v, Tensor)})

    def unpack(self, values: Tensor) -> Tensor:
        """Scatters values [response tokens] into [rows, response length], with 0 elsewhere."""
        return values.new_zeros(self.response_shape).put(self.places, values)

    def padded_token_ids(self) -> Tensor:
        """The token ids, [sequences, longest], with zeros on the right."""
        return spread(self.token_ids.squeeze(0), self.offsets, self.longest)

    def predicting_in_line(self, padded: Tensor) -> Tensor:
        """The values that predict the response tokens, [response tokens, ...], from padded ones.

        `padded` is [sequences, longest, ...].
        """
        return padded[coordinates(self.offsets, self.token_ids.shape[1])][self.predicting]

    def attention_arguments(self) -> dict[str, Any]:
        """Arguments for `trainer.models.attention`, by the names that Transformers passes on to every layer."""
        return {
            "cu_seq_lens_q": self.offsets,
            "cu_seq_lens_k": self.offsets,
            "max_length_q": self.longest,
            "max_length_k": self.longest,
        }


def coordinates(offsets: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """The sequence of each token of a packed line and the token's place in it, both [tokens] int64."""
    lengths = offsets.diff().long()
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=offsets.device), lengths, output_size=tokens)
    return sequence, torch.arange(tokens, device=offsets.device) - offsets[:-1].long()[sequence]


def spread(packed: Tensor, offsets: Tensor, longest: int) -> Tensor:
    """Pads the sequences of a packed line, [tokens, ...], with zeros on the right: [sequences, longest, ...]."""
    padded = packed.new_zeros(len(offsets) - 1, longest, *packed.shape[1:])
    return padded.index_put(coordinates(offsets, len(packed)), packed)
