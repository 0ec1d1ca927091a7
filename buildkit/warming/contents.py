"""Which files of a cache directory are compiled code that others can use."""

import re
from collections.abc import Iterator
from pathlib import Path

PACKED = ("inductor", "triton", "vllm/modelinfos", "vllm/torch_compile_cache")
"""Folders below the cache directory: Inductor's, Triton's and vLLM's compiled code, and vLLM's facts about models."""
LEFT_OUT = re.compile(r"cache_key_factors\.json|locks|.*\.lock|\..*|tmp\..*|.*\.tmp\b.*")
"""Names of files and folders: vLLM's record of the environment, which nothing reads; locks; what is half written."""
FOLDERS = {Path(folder).parts[0] for folder in PACKED}


def packed_files(folder: Path) -> Iterator[str]:
    """The names of the files to pack. Links are left out: compilers write none, and a link could lead anywhere."""
    for place in PACKED:
        for path in (folder / place).rglob("*"):
            inside = path.relative_to(folder)
            if path.is_file() and not path.is_symlink() and not any(map(LEFT_OUT.fullmatch, inside.parts)):
                yield inside.as_posix()
