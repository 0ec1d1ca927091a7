"""The commands of `data`: files of prompts."""

from pathlib import Path
from typing import Annotated

import typer

from trainer.commands.output import emit

data = typer.Typer(help="Write files of prompts.", no_args_is_help=True)


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


@data.command()
def preferences(
    output: Annotated[Path, typer.Option(help="Directory for the two Parquet files.")] = Path("data"),
    train: Annotated[int, typer.Option(min=1, help="Training pairs.")] = 4096,
    validation: Annotated[int, typer.Option(min=1, help="Held-out pairs.")] = 256,
    max_number: Annotated[int, typer.Option(min=2, help="Largest number in a question.")] = 9,
    seed: Annotated[int, typer.Option(help="Seed of the questions.")] = 0,
) -> None:
    """Write preference pairs for the questions of `data arithmetic`: a right and a wrong answer to each."""
    from trainer.data.arithmetic import write_preferences

    for path in write_preferences(output, train, validation, max_number, seed):
        emit(path)


@data.command()
def gsm8k(
    input: Annotated[Path, typer.Option(help="GSM8K as Parquet or JSON Lines, with the columns question and answer.")],
    output: Annotated[Path | None, typer.Option(help="Parquet file to write. The default is beside the input.")] = None,
) -> None:
    """Convert a GSM8K file to prompts."""
    from trainer.data.gsm8k import convert_gsm8k

    emit(convert_gsm8k(input, output))
