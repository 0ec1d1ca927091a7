"""Sections extended by the parameters of rows."""

import pytest
from pydantic import Field

from trainer.config.section import Section, with_parameters
from trainer.rows import Parameter, Row


class Example(Section):
    """A section."""

    name: str = Field("first", description="row in use")


SIZE = Parameter(type=int, default=1, description="size", constraints={"gt": 0})


def test_rows_that_share_a_parameter_add_one_setting() -> None:
    rows = {name: Row(name=name, parameters={"size": SIZE}) for name in ("first", "second")}
    extended = with_parameters(Example, [rows])
    assert list(extended.model_fields) == ["name", "size"]
    assert extended.model_fields["size"].description == "size"


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"size": Parameter(type=int, default=2, description="another size")}, "second: .* parameter size differently"),
        ({"name": Parameter(type=str, description="a name")}, "second: .* already has a setting name"),
    ],
)
def test_a_name_with_two_meanings_is_refused(parameters: dict[str, Parameter], words: str) -> None:
    rows = {"first": Row(name="first", parameters={"size": SIZE}), "second": Row(name="second", parameters=parameters)}
    with pytest.raises(ValueError, match=words):
        with_parameters(Example, [rows])
