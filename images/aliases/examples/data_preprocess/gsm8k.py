"""Writes GSM8K's train.parquet and test.parquet: `python3 examples/data_preprocess/gsm8k.py --local_dir DIR`."""

import argparse
import sys
from pathlib import Path

from huggingface_hub import hf_hub_download

from trainer.data.gsm8k import convert_gsm8k

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--local_dir", "--local_save_dir", dest="directory", default="~/data/gsm8k", help="where to write")
parser.add_argument("--local_dataset_path", help="directory of a downloaded openai/gsm8k; else the Hugging Face hub")
arguments = parser.parse_args()

for split in ("train", "test"):
    name = f"main/{split}-00000-of-00001.parquet"
    if arguments.local_dataset_path:
        source = Path(arguments.local_dataset_path).expanduser() / name
    else:
        source = Path(hf_hub_download("openai/gsm8k", name, repo_type="dataset"))
    target = Path(arguments.directory).expanduser() / f"{split}.parquet"
    sys.stdout.write(f"{convert_gsm8k(source, target)}\n")
