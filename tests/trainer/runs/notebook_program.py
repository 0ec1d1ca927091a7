"""Runs the cells of a notebook as Jupyter does: in order, in one process, in a running event loop."""

import asyncio
import json
import sys
from pathlib import Path


async def run_cells(notebook: Path) -> None:
    for cell in json.loads(notebook.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {cell['id']}", "exec"), globals())


if __name__ == "__main__":
    asyncio.run(run_cells(Path(sys.argv[1])))
