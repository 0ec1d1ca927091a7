"""The learning curve of a run as a picture: python docs/assets/demo_curve.py runs/ID > docs/assets/demo.svg"""

import sys
from functools import partial
from pathlib import Path

from trainer.records.files.run_files import read_run
from trainer.records.pages.plots import draw_learning, figure_svg

INK = "#7d8590"  # readable on a light and on a dark page


def main() -> None:
    run = read_run(Path(sys.argv[1]))
    sys.stdout.write(figure_svg(partial(draw_learning, run=run), wide=True).replace("currentColor", INK))


if __name__ == "__main__":
    main()
