"""Writes GSM8K's train.parquet and test.parquet: `python3 examples/data_preprocess/gsm8k.py --local_dir DIR`."""

import argparse
import sys
from pathlib import Path

from trainer.data.published.origins import Hub, Local
from trainer.data.published.table import DATASETS
from trainer.data.published.writing import write_dataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--local_dir", "--local_save_dir", dest="directory", default="~/data/gsm8k", help="where to write")
parser.add_argument("--local_dataset_path", help="directory of a downloaded openai/gsm8k; else the Hugging Face hub")
arguments = parser.parse_args()

copy = arguments.local_dataset_path
origin = Local((Path(copy).expanduser(),)) if copy else Hub()
for path in write_dataset(DATASETS["gsm8k"], origin, Path(arguments.directory).expanduser()):
    sys.stdout.write(f"{path}\n")
