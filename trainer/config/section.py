"""The base of every section, and the types of paths."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model

from trainer.hub import HUB_NAME
from trainer.rows import Parameter, Row


def _absolute(path: Path) -> Path:
    return _expanded(path).absolute()


def _expanded(path: Path) -> Path:
    """The path with `~` replaced. Raises ValueError for `~NAME` of a user that there is not."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ValueError(f"{path}: no such user; write ./{path} for a file of this name") from error


def _absolute_unless_of_the_hub(path: Path) -> Path:
    return path if is_hub_name(path) else _absolute(path)


def is_hub_name(path: Path) -> bool:
    """Whether the path names a model or data set on the Hugging Face hub, like `Qwen/Qwen2.5-0.5B`, and nothing local;
    no data set's name ends like a data file."""
    return HUB_NAME.fullmatch(str(path)) is not None and not _expanded(path).exists()


# Workers run in another directory, so settings hold absolute paths.
AbsolutePath = Annotated[Path, AfterValidator(_absolute)]
ModelPath = Annotated[Path, AfterValidator(_absolute_unless_of_the_hub)]
DataPath = Annotated[Path, AfterValidator(_absolute_unless_of_the_hub)]


def _read_values(given: dict[str, Any]) -> dict[str, Any]:
    return {name: yaml.safe_load(value) if isinstance(value, str) else value for name, value in given.items()}


# The command line gives text, and code takes the text `false` for true.
Arguments = Annotated[dict[str, Any], AfterValidator(_read_values)]


class Section(BaseModel):
    """A group of settings: typed and immutable. Unknown names are an error. `plain_value` names the setting that the
    value stands for where the section itself is given one."""

    plain_value: ClassVar[str | None] = None

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, coerce_numbers_to_str=True)


AnySection = TypeVar("AnySection", bound=Section)


def with_parameters(section: type[AnySection], tables: Sequence[Mapping[str, Row]]) -> type[AnySection]:
    """The section extended by a setting for each parameter of the rows in these tables.

    Raises ValueError if a name has two meanings: in two rows, or in a row and the section.
    """
    parameters: dict[str, Parameter] = {}
    for row in (row for table in tables for row in table.values()):
        for name, parameter in row.parameters.items():
            if name in section.model_fields:
                raise ValueError(f"{row.name}: the section already has a setting {name}")
            if parameters.setdefault(name, parameter) != parameter:
                raise ValueError(f"{row.name}: another row defines the parameter {name} differently")
    fields: dict[str, Any] = {
        name: (
            parameter.type,
            Field(parameter.default, description=parameter.description, **parameter.constraints),
        )
        for name, parameter in parameters.items()
    }
    return create_model(
        section.__name__, __base__=section, __module__=section.__module__, __doc__=section.__doc__, **fields
    )
