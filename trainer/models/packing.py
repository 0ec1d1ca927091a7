"""Packed rows, the networks' input: the rows of a batch end to end, without padding."""

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from trainer.data.batches.batch import Batch
from trainer.data.batches.copies import to_device
from trainer.data.batches.routes import Choices, Routes, Segment

ATTENTION_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "visible", "among_visible")


@dataclass(frozen=True)
class PackedRows:
    """All tokens of some rows in one line, in which several rows may share the tokens of one prompt.

    Shapes: `token_ids` and `positions` (within the row) [1, tokens] int64; `offsets` [sequences + 1] int32, the bounds
    of the rows; `predicting` [response tokens] int64, the index in the line that predicts each response token;
    `targets` [response tokens] int64, the response tokens; `places` [response tokens] int64, their indices in the
    flattened [rows, response length]. `longest` is the length of the longest row.

    With shared prompts, a row holds its own tokens only and also sees others: `visible` [visible tokens] int64, the
    indices in the line of all tokens of the rows, prompts repeated; `visible_offsets` [sequences + 1] int32, the bounds
    of the rows among them; `longest_visible`; `among_visible` [tokens] int64, the place of each token of the line among
    the visible ones.
    Otherwise `visible` and `among_visible` are None.

    `routes` [tokens, layers, choices] uint8 or int16 are the experts that the tokens are to choose; see `known_routes`.
    None if the routers choose for all of them.
    """

    token_ids: Tensor
    positions: Tensor
    offsets: Tensor
    longest: int
    predicting: Tensor
    targets: Tensor
    places: Tensor
    response_shape: tuple[int, int]
    visible_offsets: Tensor
    longest_visible: int
    visible: Tensor | None = None
    among_visible: Tensor | None = None
    routes: Tensor | None = None

    @classmethod
    def of(cls, batch: Batch, multiple: int = 1, share_prompts: bool = False) -> Self:
        """Packs the rows of a batch on CPU.

        An unused sequence of zeros pads the line to a multiple of `multiple`, and the longest lengths are rounded up to
        one, so that code compiled or tuned per size sees few sizes. With `share_prompts`, rows with the same prompt are
        adjacent, and only the first of them holds it.
        """
        order, begins, starts, prompts = _places_in_line(batch, share_prompts)
        token_ids, lengths, prompt_lengths = batch.token_ids[order], batch.lengths[order], batch.prompt_lengths[order]
        if spare := -int((lengths - begins).sum()) % multiple:
            token_ids = pad(token_ids, (0, max(0, spare - token_ids.shape[1]), 0, 1))
            starts = pad(starts, (0, 1), value=int((lengths - begins).sum()))
            lengths = pad(lengths, (0, 1), value=spare)
            prompt_lengths, begins, prompts = (pad(tensor, (0, 1)) for tensor in (prompt_lengths, begins, prompts))
        columns = torch.arange(token_ids.shape[1]).expand_as(token_ids)
        seen, in_prompt = columns < lengths.unsqueeze(1), columns < prompt_lengths.unsqueeze(1)
        in_row = seen & (columns >= begins.unsqueeze(1))
        line = columns + torch.where(in_prompt, prompts.unsqueeze(1), (starts - begins).unsqueeze(1))
        seen_places = columns + (lengths.cumsum(0) - lengths).unsqueeze(1)
        rows, response_columns = batch.response_mask.nonzero(as_tuple=True)
        row_columns = batch.prompt_lengths[rows] + response_columns
        return cls(
            token_ids=token_ids[in_row].unsqueeze(0),
            positions=columns[in_row].unsqueeze(0),
            offsets=_bounds(lengths - begins),
            longest=_rounded(lengths - begins, multiple),
            predicting=line[order.argsort()[rows], row_columns - 1],
            targets=batch.token_ids[rows, row_columns],
            places=rows * batch.response_mask.shape[1] + response_columns,
            response_shape=(batch.response_mask.shape[0], batch.response_mask.shape[1]),
            visible_offsets=_bounds(lengths),
            longest_visible=_rounded(lengths, multiple),
            visible=line[seen] if share_prompts else None,
            among_visible=seen_places[in_row] if share_prompts else None,
            routes=None
            if batch.routes is None
            else _routes_of_line(batch.routes.rows(order.tolist()), line, lengths, int(in_row.sum())),
        )

    def to(self, device: torch.device) -> Self:
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{k: to_device(v, device) for k, v in tensors.items() if isinstance(v, Tensor)})

    def share(self, rank: int, size: int) -> Self:
        """Every size-th token of the line, from the rank-th on, with the response tokens that these tokens predict.

        `size` must divide the tokens of the line. What attention needs to know still describes the whole line.
        """
        # Waits for the GPU, once a pass: how many response tokens these are depends on the lengths.
        in_share = (self.predicting % size == rank).nonzero().squeeze(1)
        return replace(
            self,
            token_ids=self.token_ids[:, rank::size].contiguous(),
            positions=self.positions[:, rank::size].contiguous(),
            predicting=self.predicting[in_share] // size,
            targets=self.targets[in_share],
            places=self.places[in_share],
            routes=None if self.routes is None else self.routes[rank::size].contiguous(),
        )

    def unpack(self, values: Tensor) -> Tensor:
        """Scatters values [response tokens] into [rows, response length], with 0 elsewhere."""
        # `put` has no deterministic implementation, and a view of the result would not do: FSDP2 warns of it.
        columns = self.response_shape[1]
        places = (self.places // columns, self.places % columns)
        return values.new_zeros(self.response_shape).index_put(places, values)

    def padded(self, line: Tensor, fill: int = 0) -> Tensor:
        """What the tokens of the line have, [tokens, ...], filled up on the right: [sequences, longest, ...]."""
        return spread(line, self.offsets, self.longest, fill)

    def in_line(self, padded: Tensor) -> Tensor:
        """The reverse of `padded`."""
        return padded[coordinates(self.offsets, self.token_ids.shape[1])]

    def padded_token_ids(self) -> Tensor:
        """The token ids, [sequences, longest], with zeros on the right."""
        return self.padded(self.token_ids.squeeze(0))

    def predicting_in_line(self, padded: Tensor) -> Tensor:
        """The values that predict the response tokens, [response tokens, ...], from padded ones.

        `padded` is [sequences, longest, ...].
        """
        return self.in_line(padded)[self.predicting]

    def attention_arguments(self) -> dict[str, Any]:
        """ATTENTION_ARGUMENTS for `trainer.models.attention`. Transformers passes them on to every layer."""
        lengths = (self.offsets, self.visible_offsets, self.longest, self.longest_visible)
        return dict(zip(ATTENTION_ARGUMENTS, (*lengths, self.visible, self.among_visible), strict=True))


def _places_in_line(batch: Batch, share_prompts: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The order of the rows in their line and, for each in this order, the first token that is its own, the place of
    that token in the line, and the place of its prompt; all [rows] int64."""
    groups = batch.shared_prompts().groups if share_prompts else [[row] for row in range(len(batch))]
    order = torch.tensor([row for group in groups for row in group])
    group = torch.tensor([number for number, group in enumerate(groups) for _ in group])
    leads = group.diff(prepend=torch.tensor([-1])) > 0
    begins = batch.prompt_lengths[order].where(~leads, 0)
    lengths = batch.lengths[order] - begins
    starts = lengths.cumsum(0) - lengths
    return order, begins, starts, starts[leads][group]


def routes_of_rows(batch: Batch, share_prompts: bool, line: Choices) -> Routes:
    """The choices of the rows, from those of all tokens of their line, [tokens, layers, choices]."""
    places = (tensor.tolist() for tensor in _places_in_line(batch, share_prompts))
    lengths, prompt_lengths = batch.lengths.tolist(), batch.prompt_lengths.tolist()
    segments: list[list[Segment]] = [[] for _ in lengths]
    of_prompts: dict[int, Choices] = {}
    for row, begin, start, prompt in zip(*places, strict=True):
        length = prompt_lengths[row]
        of_prompt = of_prompts.setdefault(prompt, line[prompt : prompt + length])
        response = line[start + length - begin : start + lengths[row] - begin]
        segments[row] = [Segment(0, of_prompt), Segment(length, response)]
    return Routes(segments)


def _routes_of_line(routes: Routes, line: Tensor, lengths: Tensor, tokens: int) -> Tensor | None:
    """The recorded choices of a line of so many tokens; None if there are none.

    `line` [rows, columns] is the place in the line of each token of a row with `lengths` [rows] tokens. The rows are
    those of `routes`, and maybe one more, which pads the line.
    """
    given = None
    for row, first, choices in routes.in_memory():
        if given is None:
            given = np.full((tokens, *choices.shape[1:]), np.iinfo(choices.dtype).max, choices.dtype)
        places = line[row, first : min(int(lengths[row]), first + len(choices))].numpy()
        given[places] = choices[: len(places)]
    return None if given is None else torch.from_numpy(given)


def known_routes(routes: Tensor) -> Tensor:
    """Which choices are recorded: all but the largest number of their type, of the same shape, bool."""
    return routes < torch.iinfo(routes.dtype).max


def _bounds(lengths: Tensor) -> Tensor:
    """Where sequences of these lengths begin, and where the last one ends, [sequences + 1] int32."""
    return pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def _rounded(lengths: Tensor, multiple: int) -> int:
    """The largest length, rounded up to a multiple."""
    return -(-int(lengths.max()) // multiple) * multiple


def coordinates(offsets: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """The sequence of each token of a packed line and the token's place in it, both [tokens] int64."""
    lengths = offsets.diff().long()
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=offsets.device), lengths, output_size=tokens)
    return sequence, torch.arange(tokens, device=offsets.device) - offsets[:-1].long()[sequence]


def spread(packed: Tensor, offsets: Tensor, longest: int, fill: int = 0) -> Tensor:
    """Pads the sequences of a packed line, [tokens, ...], on the right: [sequences, longest, ...]."""
    padded = packed.new_full((len(offsets) - 1, longest, *packed.shape[1:]), fill)
    return padded.index_put(coordinates(offsets, len(packed)), packed)
