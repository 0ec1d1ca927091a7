"""Pages made of templates; each is one self-contained file."""

from pathlib import Path

import jinja2

from trainer.errors import DataError
from trainer.records.files.atomic import atomic_file


def write_page(path: Path, template: str, **content: object) -> None:
    """Renders a template of this package to a file, with all text escaped. Raises DataError if it cannot be written."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("trainer.records.pages"),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    text = environment.get_template(template).render(content)
    try:
        with atomic_file(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error}", hint="name another --output") from error
