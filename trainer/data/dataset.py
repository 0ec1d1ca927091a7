"""The tokenised prompts of a run, and the order in which training draws them."""

import copy
import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, Self

import pyarrow as pa
from pydantic import Field
from typing_extensions import TypedDict  # pydantic reads typing's from Python 3.12 on

from trainer.config.custom_code import check_parameters, load_custom
from trainer.config.sections.data import DataConfig
from trainer.config.sections.trainer import TrainerConfig
from trainer.data.formats.chat_template import checked_conversation_text, with_system_prompt
from trainer.data.formats.files import (
    MissingColumnError,
    Rows,
    column_of,
    read_rows,
    rows_in_memory,
    stored_files,
    value_at,
)
from trainer.data.formats.messages import MEDIA, checked_text, refuse_media, text_messages
from trainer.data.formats.tools import checked_tools, read_tools, selected
from trainer.data.published.mapping import conversion_hint, likely_column
from trainer.data.subset import EVERY_ROW, Subset
from trainer.errors import CheckpointError, DataError
from trainer.records.files.atomic import atomic_file

_HINT = "make the file with `python -m trainer data arithmetic` or `python -m trainer data gsm8k`"
_TABLE = pa.schema(
    {
        "token_ids": pa.list_(pa.int32()),
        "file": pa.int32(),  # its position in data.train_files or data.validation_files
        "ground_truth": pa.string(),  # JSON, because it may be a number, a list or a mapping
        "data_source": pa.string(),
        "question": pa.string(),
        "messages": pa.string(),  # JSON
        "extra_info": pa.string(),  # JSON, because its fields are the user's
        "agent_name": pa.string(),
    }
)
# In the order of `Prompt`.
_OTHERS = ("ground_truth", "data_source", "question", "extra_info", "messages", "agent_name")
SINGLE_TURN = "single_turn_agent"  # verl's name for rows that nobody answers
_OPTIONAL = ("extra_info", "tools", "agent_name", *MEDIA)
_ROWS_AT_A_TIME = 1024


@dataclass(frozen=True)
class Prompt:
    """A tokenised prompt with what scores its responses.

    `index` is its position in the dataset. `ground_truth` (text, a number, a list or a mapping) and `extra_info` go to
    the reward, `messages` to a reward model with its own chat template. `agent_name` says who answers the policy, in
    verl's words; "" leaves it to `rollout.agent`.
    """

    index: int
    token_ids: tuple[int, ...]
    ground_truth: Any
    data_source: str
    question: str
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Mapping[str, str]] = ()
    agent_name: str = ""

    @property
    def chat(self) -> Sequence[Mapping[str, str]]:
        """The messages, or the question as a user's message if the dataset has none."""
        return self.messages or ({"role": "user", "content": self.question},)


class Dataset(Protocol):
    """The source of a run's prompts. Your own class (`data.custom_cls`) takes (files, tokenizer, data settings) and
    returns a `Prompt` for each index from 0."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Prompt: ...


def open_dataset(files: Sequence[Path], tokenizer: Any, settings: DataConfig, subset: Subset = EVERY_ROW) -> Dataset:
    """The prompts of the files, read by the user's own class if there is one. Raises DataError or ConfigError."""
    if settings.custom_cls.path is None:
        return PromptDataset(files, tokenizer, settings, subset)
    name = settings.custom_cls.name or "Dataset"
    make = load_custom("data.custom_cls", settings.custom_cls.path, name)
    check_parameters("data.custom_cls", make, positional=("files", "tokenizer", "settings"))
    made = make(files, tokenizer, settings)
    where = f"data.custom_cls {settings.custom_cls.path}: {name}"
    if not hasattr(made, "__len__") or not hasattr(made, "__getitem__"):
        raise DataError(f"{where} has no __len__ or no __getitem__", hint="see trainer.data.dataset.Dataset")
    if len(made) == 0 or not isinstance(made[0], Prompt):
        kind = type(made[0]).__name__ if len(made) else "nothing"
        raise DataError(f"{where} gives {kind}, not a Prompt", hint="see trainer.data.dataset.Prompt")
    return made  # type: ignore[no-any-return]


def check_files(settings: DataConfig, names: Sequence[Literal["train_files", "validation_files"]]) -> None:
    """Raises DataError if one of these settings names no file."""
    for name in names:
        if not getattr(settings, name):
            raise DataError(f"data.{name} names no file", hint=f"set data.{name}=FILE")


class PromptDataset:
    """The prompts of files, or of a subset of their rows, in file order, with the chat template applied.

    One Arrow table holds them. With `data.cache_dir` it is a memory-mapped file that the next run reuses.

    Raises DataError if a file is missing, damaged, empty or has other columns, or if a prompt has more than
    `data.max_prompt_length` tokens under `data.overlong_prompts=error`.
    """

    def __init__(
        self,
        files: Sequence[Path],
        tokenizer: Any,
        settings: DataConfig,
        subset: Subset = EVERY_ROW,
        rows: Sequence[Any] | None = None,
    ) -> None:
        """`rows`, if something else has read them, are those of the only file, which then need not exist."""
        self._files = files
        if rows is not None:
            known = rows_in_memory(str(files[0]), rows, _required(settings), _HINT, _OPTIONAL)
            self._table = _tokenised(files, [known], tokenizer, settings, subset)
        elif settings.cache_dir is None:
            self._table = _tokenised(files, _read(files, settings), tokenizer, settings, subset)
        else:
            self._table = _cached(settings.cache_dir, files, tokenizer, settings, subset)
        if len(self._table) == 0:
            raise DataError(
                f"{', '.join(map(str, files))}: no prompt has at most {settings.max_prompt_length} tokens",
                hint="raise data.max_prompt_length",
            )
        self._token_ids = self._table["token_ids"]
        self._others = [self._table[name] for name in _OTHERS]

    def __len__(self) -> int:
        return len(self._table)

    def count_sources(self) -> Mapping[tuple[Path, str], int]:
        """The number of prompts by file and data source."""
        counts = self._table.group_by(["file", "data_source"], use_threads=False).aggregate([([], "count_all")])
        totals: Counter[tuple[Path, str]] = Counter()
        for row in counts.to_pylist():
            totals[self._files[row["file"]], row["data_source"]] += row["count_all"]
        return totals

    def agent_names(self) -> set[str]:
        """The agents that rows name; "" for rows that name none."""
        return set(self._table["agent_name"].unique().to_pylist())

    def __getitem__(self, index: int) -> Prompt:
        token_ids = self._token_ids[index].values.to_numpy().tolist()  # `as_py` is slower: it makes two objects a token
        truth, source, question, extra_info, messages, agent_name = (column[index].as_py() for column in self._others)
        return Prompt(
            index,
            tuple(token_ids),
            json.loads(truth),
            source,
            question,
            json.loads(extra_info),
            json.loads(messages),
            agent_name,
        )


def _cached(directory: Path, files: Sequence[Path], tokenizer: Any, settings: DataConfig, subset: Subset) -> pa.Table:
    """The table from its file in `directory`, written there first for new files, tokenizers or limits."""
    cache = directory / f"{_digest(files, tokenizer, settings, subset)}.arrow"
    if not cache.is_file():
        table = _tokenised(files, _read(files, settings), tokenizer, settings, subset)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with atomic_file(cache) as temporary, pa.ipc.new_file(str(temporary), _TABLE) as writer:
                writer.write_table(table)
        except OSError as error:
            raise DataError(
                f"{cache}: cannot be written: {error}", hint="name another data.cache_dir, or set it to null"
            ) from error
    return pa.ipc.open_file(pa.memory_map(str(cache))).read_all()


def _digest(files: Sequence[Path], tokenizer: Any, settings: DataConfig, subset: Subset) -> str:
    """A hash of everything that determines the table: the files, the tokenizer with its template, the limits."""
    try:
        stored = [part for file in files for part in stored_files(file)]
        stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in stored]
    except OSError as error:
        raise DataError(f"{error.filename}: no such file", hint=_HINT) from error
    template = (settings.chat_template_kwargs, settings.system_prompt, read_tools(settings))
    limits = (settings.max_prompt_length, settings.overlong_prompts, settings.prompt_key, subset.size, subset.seed)
    known = (sorted(tokenizer.get_vocab().items()), tokenizer.chat_template)
    return hashlib.sha256(json.dumps([_TABLE.names, stats, limits, template, known]).encode()).hexdigest()[:32]


def _tokenised(
    files: Sequence[Path], tables: Sequence[Rows], tokenizer: Any, settings: DataConfig, subset: Subset
) -> pa.Table:
    """The tokenised table of the rows of each file."""
    chosen = subset.rows([len(rows) for rows in tables])
    return pa.concat_tables(
        [
            pa.Table.from_pylist(
                [{**row, "file": place} for row in _rows(file, rows, numbers, tokenizer, settings)], schema=_TABLE
            )
            for place, (file, rows, numbers) in enumerate(zip(files, tables, chosen, strict=True))
        ]
    )


def _read(files: Sequence[Path], settings: DataConfig) -> list[Rows]:
    return [_read_file(file, settings) for file in files]


def _read_file(file: Path, settings: DataConfig) -> Rows:
    try:
        return read_rows(file, _required(settings), _HINT, _OPTIONAL)
    except MissingColumnError as error:
        prompt = likely_column("prompt", error.present)
        only_prompt = error.missing == (column_of(settings.prompt_key),) and prompt
        hint = f"set data.prompt_key={prompt}" if only_prompt else conversion_hint(file, error.present)
        raise DataError(str(error), hint=hint) from error


def _required(settings: DataConfig) -> tuple[str, ...]:
    return ("data_source", column_of(settings.prompt_key), "reward_model")


def _rows(
    file: Path, rows: Sequence[dict[str, Any]], numbers: Sequence[int], tokenizer: Any, settings: DataConfig
) -> Iterator[dict[str, Any]]:
    """The tokenised prompts of the rows with these numbers."""
    tools = read_tools(settings)
    fit = _FITS[settings.overlong_prompts]
    for start in range(0, len(numbers), _ROWS_AT_A_TIME):
        places = numbers[start : start + _ROWS_AT_A_TIME]
        part = [_checked(f"{file}, row {number}", rows[number], settings) for number in places]
        texts = [
            checked_conversation_text(
                f"{file}, row {number}", row["messages"], tokenizer, settings, _tools_of(row, tools)
            )
            for number, row in zip(places, part, strict=True)
        ]
        tokenised = tokenizer(texts, add_special_tokens=False)["input_ids"]
        for number, row, token_ids in zip(places, part, tokenised, strict=True):
            fitting = fit(token_ids, settings.max_prompt_length)
            if fitting is None and settings.overlong_prompts == "error":
                raise DataError(
                    f"{file}, row {number}: the prompt has {len(token_ids)} tokens, "
                    f"data.max_prompt_length is {settings.max_prompt_length}",
                    hint=f"set data.max_prompt_length={len(token_ids)} or more, or data.overlong_prompts=filter",
                )
            if fitting is not None:
                yield _row(row, fitting)


def _tools_of(row: Mapping[str, Any], tools: Sequence[Any]) -> Sequence[Any]:
    """The tools in a row's prompt: its own, or those of the file that it selects, as in verl."""
    if row["tools"]:
        return list(row["tools"])
    if row["agent_name"] == SINGLE_TURN:
        return []
    return selected(tools, row["extra_info"].get("tool_selection"))


def _kept_if_short(token_ids: list[int], limit: int) -> list[int] | None:
    return token_ids if len(token_ids) <= limit else None


# How a prompt is made to fit, by `data.overlong_prompts`; None if it does not fit.
_FITS: dict[str, Callable[[list[int], int], list[int] | None]] = {
    "error": _kept_if_short,
    "filter": _kept_if_short,
    "truncate_left": lambda token_ids, limit: token_ids[-limit:],
    "truncate_right": lambda token_ids, limit: token_ids[:limit],
}


def _checked(where: str, row: Mapping[str, Any], settings: DataConfig) -> dict[str, Any]:
    """The row with its prompt as `messages` of plain text, after the system prompt, and a mapping as `extra_info`.

    Raises DataError.
    """
    reward_model, extra_info = row["reward_model"], row["extra_info"]
    messages = value_at(where, row, settings.prompt_key, _HINT)
    for column, value in (("reward_model", reward_model), ("extra_info", extra_info)):
        if value is not None and not isinstance(value, dict):
            raise DataError(f"{where}: column {column} is {type(value).__name__} instead of a mapping", hint=_HINT)
    if not messages or not reward_model or reward_model.get("ground_truth") is None:
        raise DataError(f"{where}: prompt or reward_model.ground_truth is empty", hint=_HINT)
    if isinstance(reward_model["ground_truth"], bytes):
        raise DataError(f"{where}: reward_model.ground_truth is bytes", hint="write it as text")
    refuse_media(where, row)
    checked_text(f"{where}: column data_source", row["data_source"], "name the data set of each row")
    texts = with_system_prompt(text_messages(where, settings.prompt_key, messages, _HINT, role="user"), settings)
    tools = checked_tools(where, row["tools"]) if row["tools"] else None
    agent_name = checked_text(f"{where}: column agent_name", row["agent_name"] or "", "name an agent, or nothing")
    return {**row, "messages": texts, "extra_info": extra_info or {}, "tools": tools, "agent_name": agent_name}


def _row(row: dict[str, Any], token_ids: list[int]) -> dict[str, Any]:
    extra_info, messages = row["extra_info"], row["messages"]
    question = extra_info.get("question") or messages[-1]["content"] or ""
    return {
        "token_ids": token_ids,
        "ground_truth": json.dumps(row["reward_model"]["ground_truth"], default=str),
        "data_source": row["data_source"],
        "question": str(question),
        "messages": json.dumps(messages, default=str),
        "extra_info": json.dumps(extra_info, default=str),
        "agent_name": row["agent_name"],
    }


class SamplerState(TypedDict):
    """The position of a PromptSampler: how many prompts of an epoch it has drawn."""

    epoch: Annotated[int, Field(ge=0)]
    position: Annotated[int, Field(ge=0)]
    size: Annotated[int, Field(gt=0)]
    seed: int


class PromptSampler:
    """Draws batches of prompt indices without end, in a new order each epoch.

    Every batch is full. It may span two epochs, so that every prompt is drawn once per epoch; with `drop_last`, an
    epoch ends with its last whole batch instead. The order depends only on (seed, epoch): a restored sampler continues
    with the same batches.
    """

    def __init__(self, size: int, batch_size: int, shuffle: bool, seed: int, drop_last: bool = False) -> None:
        if size < 1 or batch_size < 1:
            raise DataError(f"cannot draw batches of {batch_size} from {size} prompts", hint=_HINT)
        self._size, self._batch_size, self._shuffle, self._seed = size, batch_size, shuffle, seed
        self._drop_last = drop_last
        self._start_epoch(0)

    @classmethod
    def of(cls, settings: DataConfig, trainer: TrainerConfig, rows: int) -> Self:
        """The sampler of a run on so many rows. Raises DataError if a step would draw rows more than once."""
        if rows < settings.train_batch_size and not trainer.validate_only:
            raise DataError(
                f"data.train_batch_size={settings.train_batch_size}: a step would repeat the {rows} rows of "
                "data.train_files",
                hint=f"set data.train_batch_size={rows} or less",
            )
        return cls(rows, settings.train_batch_size, settings.shuffle, trainer.seed, settings.drop_last)

    def next_batch(self) -> list[int]:
        """The next `batch_size` indices."""
        if self._drop_last and self._size - self._position < self._batch_size <= self._size:
            self._start_epoch(self._epoch + 1)
        batch: list[int] = []
        while len(batch) < self._batch_size:
            if self._position == self._size:
                self._start_epoch(self._epoch + 1)
            drawn = self._order[self._position : self._position + self._batch_size - len(batch)]
            self._position += len(drawn)
            batch += drawn
        return batch

    def peek(self) -> list[int]:
        """The next batch, without drawing it."""
        return copy.copy(self).next_batch()  # a new epoch gets a new list, so the copy changes nothing here

    def state_dict(self) -> SamplerState:
        """The position of the sampler, as plain numbers."""
        return {"epoch": self._epoch, "position": self._position, "size": self._size, "seed": self._seed}

    def load_state_dict(self, state: SamplerState) -> None:
        """Continues from `state`. Raises CheckpointError if it belongs to other data or another seed, or is none."""
        for name, theirs, mine in (("size", state["size"], self._size), ("seed", state["seed"], self._seed)):
            if theirs != mine:
                raise CheckpointError(
                    f"the checkpoint drew its prompts with {name} {theirs}, this run has {name} {mine}",
                    hint="resume with the training files and trainer.seed of the run that wrote the checkpoint",
                )
        if not 0 <= state["position"] <= self._size:
            raise CheckpointError(
                f"the checkpoint drew {state['position']} of {self._size} prompts",
                hint="resume from another checkpoint",
            )
        self._start_epoch(state["epoch"])
        self._position = state["position"]

    def _start_epoch(self, epoch: int) -> None:
        self._epoch, self._position = epoch, 0
        self._order = list(range(self._size))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
