"""The commands of `data`: files of prompts and of preference pairs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainer.commands.output import emit
from trainer.data.published.table import DATASETS, PublishedDataset
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from trainer.data.published.origins import Origin

data = typer.Typer(help="Write files of prompts and of preference pairs.", no_args_is_help=True)


@data.command()
def arithmetic(
    output: Annotated[Path, typer.Option(help="Directory for the three Parquet files.")] = Path("data"),
    train: Annotated[int, typer.Option(min=1, help="Training questions.")] = 4096,
    validation: Annotated[int, typer.Option(min=1, help="Held-out questions.")] = 256,
    max_number: Annotated[int, typer.Option(min=2, help="Largest number in a question.")] = 9,
    dropped_carries: Annotated[
        float,
        typer.Option(min=0, max=1, help="Share of demonstrated sums with a carry that drop it."),
    ] = 0.75,
    seed: Annotated[int, typer.Option(help="Seed of the questions.")] = 0,
) -> None:
    """Write word problems about small sums, with demonstrations that often drop the carry."""
    from trainer.data.arithmetic import write_arithmetic

    for path in write_arithmetic(output, train, validation, max_number, dropped_carries, seed):
        emit(path)


def _add(dataset: PublishedDataset) -> None:
    """Adds the command of a published data set."""

    def write(
        output: Annotated[Path, typer.Option(help="Directory for train.parquet and test.parquet.")] = Path("data")
        / dataset.name,
        source: Annotated[
            list[Path] | None,
            typer.Option(
                "--from",
                help="Local copy: a folder, or files, of which those with `test` in their name are test files.",
            ),
        ] = None,
        hub: Annotated[
            str | None, typer.Option(help="Another data set of the Hugging Face hub with such columns: OWNER/NAME.")
        ] = None,
        synthetic: Annotated[
            int | None, typer.Option(min=1, help="Make up so many training rows, without a network.")
        ] = None,
        seed: Annotated[int | None, typer.Option(help="Seed of the synthetic rows; 0 if not given.")] = None,
        column: Annotated[
            list[str] | None,
            typer.Option(metavar="PART=COLUMN", help="Column of a part of a row, like answer=solution."),
        ] = None,
    ) -> None:
        from trainer.data.published.writing import write_dataset

        for path in write_dataset(dataset, _origin(dataset, source, hub, synthetic, seed, column), output):
            emit(path)

    hubs = " and ".join(dict.fromkeys(split.hub for split in dataset.splits.values()))
    scored = f"The rule `{dataset.rule}` scores it." if dataset.rule else "No rule scores it."
    parts = f"A row's parts: {', '.join(dataset.parts)}."
    data.command(dataset.name, help=f"Write {dataset.title}, from {hubs}. {scored} {parts}")(write)


def _origin(
    dataset: PublishedDataset,
    source: list[Path] | None,
    hub: str | None,
    synthetic: int | None,
    seed: int | None,
    column: list[str] | None,
) -> "Origin":
    from trainer.data.published.origins import Hub, Local, Synthetic

    given = {"--from": source, "--hub": hub, "--synthetic": synthetic}
    named = [option for option, value in given.items() if value]
    if len(named) > 1:
        raise ConfigError(f"{' and '.join(named)} name different rows", hint="give one of them")
    if seed is not None and synthetic is None:
        raise ConfigError("--seed changes nothing without --synthetic", hint="leave it out, or add --synthetic N")
    columns = _columns(dataset, column or [])
    if synthetic is not None:
        if columns:
            raise ConfigError("--column changes nothing with --synthetic", hint="leave it out")
        return Synthetic(synthetic, seed or 0)
    return Local(tuple(source), columns) if source else Hub(hub or "", columns)


def _columns(dataset: PublishedDataset, given: list[str]) -> dict[str, str]:
    columns = {}
    for text in given:
        part, _, name = text.partition("=")
        if part not in dataset.parts or not name:
            raise ConfigError(
                f"--column {text}: not a part of a row of {dataset.name} and its column",
                hint="parts are " + ", ".join(dataset.parts),
            )
        columns[part] = name
    return columns


for _dataset in DATASETS.values():
    _add(_dataset)
