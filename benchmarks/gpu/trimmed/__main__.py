"""Checks on this GPU that packages trimmed like an image's still work, for hosts that cannot pull the image.

    python3 -m benchmarks.gpu.trimmed --variant vllm0.26-torch2.11-cu130 [SITE_PACKAGES…]

Copies the folders of packages by hard links into a virtual environment of its own, takes out what the variant's
`exclude` and `prune` in images/matrix.toml name (what `install-wheels` takes out of an image), and runs the tasks of
`benchmarks.gpu.trimmed.tasks` there, each in a fresh process that cannot reach the whole packages. A row per task says
which files that are gone it asked for. `--cpu` rehearses with the wheels of the cpu variant.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from benchmarks.gpu.common import Results, arguments, write_job
from buildkit.recipe.lock import Lock
from buildkit.recipe.lock_file import find_lock
from buildkit.recipe.matrix import Variant, load_matrix

ROOT = Path(__file__).resolve().parents[3]
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
TASKS = {  # seconds
    "libraries": 30,
    "imports": 60,
    "kernels": 70,
    "compile": 80,
    "attention": 70,
    "collectives": 60,
    "ray": 60,
    "generation": 120,
}
DEADLINE = 140  # seconds for all of it


@dataclass
class Trimmed:
    """Copies of `sources`, in their order. `removed` are paths in site-packages, `folders` are whole folders there."""

    sources: list[Path]
    copies: list[Path] = field(default_factory=list)
    removed: set[str] = field(default_factory=set)
    folders: set[str] = field(default_factory=set)

    @property
    def python(self) -> Path:
        return self.copies[-1].parents[2] / "bin" / "python"

    def environment(self) -> dict[str, str]:
        """The environment of a process that finds only these packages: no CUDA toolkit, no user packages."""
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("CUDA_", "PYTHON", "TRITON_"))
        }
        if devices := os.environ.get("CUDA_VISIBLE_DEVICES"):
            kept["CUDA_VISIBLE_DEVICES"] = devices
        programs = [folder for folder in kept["PATH"].split(":") if not Path(folder, "nvcc").exists()]
        libraries = [folder for folder in kept.pop("LD_LIBRARY_PATH", "").split(":") if driver_in(folder)]
        kept |= {"LD_LIBRARY_PATH": ":".join(libraries)} if libraries else {}
        return kept | {
            "PATH": ":".join([str(self.python.parent), *programs]),
            "PYTHONPATH": ":".join(map(str, [*self.copies[:-1], ROOT])),
            "PYTHONNOUSERSITE": "1",
            "HF_HUB_OFFLINE": "1",
            "RAY_AUTH_MODE": "disabled",
            "TOKENIZERS_PARALLELISM": "false",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
        }


def driver_in(folder: str) -> bool:
    return bool(folder) and any(Path(folder).glob("libcuda.so*"))


def package_folders() -> list[Path]:
    """The site-packages of this interpreter, in search order."""
    folders = dict.fromkeys(Path(folder).resolve() for folder in sys.path)
    return [folder for folder in folders if any(folder.glob("*.dist-info"))]


def copy(sources: list[Path], target: Path) -> tuple[Trimmed, dict[str, int]]:
    """Copies the last source into a virtual environment and the others for PYTHONPATH. Also counts links and copies."""
    trimmed = Trimmed(sources)
    counts = {"linked": 0, "copied": 0}
    venv.create(target / str(len(sources) - 1), symlinks=True)
    with ThreadPoolExecutor(max(4, os.cpu_count() or 4)) as pool:
        for number, source in enumerate(sources):
            site = target / str(number) / "lib" / PYTHON / "site-packages"
            trimmed.copies.append(site)
            jobs = [(source, site)]
            library = source.parent.parent
            if (library.parent / "pyvenv.cfg").is_file():  # wheels spread libraries there: ../ in a pattern
                jobs.append((library, site.parents[1]))
            for origin, destination in jobs:
                for copied in pool.map(lambda pair: bring(*pair), list(pairs(origin, destination))):
                    counts["copied" if copied else "linked"] += 1
    return trimmed, counts


def pairs(source: Path, target: Path) -> Iterator[tuple[Path, Path]]:
    """Files below a folder and where they go, in folders that are made; of `lib` not the Python in it."""
    for name, names, files in os.walk(source):
        folder = Path(name)
        if folder == source and source.name == "lib":
            names[:] = [name for name in names if not name.startswith("python")]
        there = target / folder.relative_to(source)
        there.mkdir(parents=True, exist_ok=True)
        links = [name for name in names if (folder / name).is_symlink()]
        yield from ((folder / name, there / name) for name in (*files, *links))


def bring(source: Path, target: Path) -> bool:
    """Hard-links a file, or copies it if that fails. Returns whether it was copied.

    A symbolic link would lead back to the untrimmed packages.
    """
    if os.path.lexists(target):
        return False
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)
        return True
    return False


def leave_out(trimmed: Trimmed, variant: Variant) -> list[str]:
    """Removes the distributions of `exclude`. Returns those that were installed."""
    excluded = {canonicalize_name(name) for name in variant.exclude}
    names = []
    for site in trimmed.copies:
        for name, distribution in installed(site):
            if name in excluded:
                names.append(name)
                for file in distribution.files or ():
                    trimmed.removed.add(str(file))
                    remove(Path(os.path.normpath(site / str(file))), site.parents[2])
    return sorted(names)


def installed(site: Path) -> list[tuple[str, Distribution]]:
    """The distributions of a folder by name; those without metadata are left out."""
    named = [(distribution.metadata.get("Name"), distribution) for distribution in distributions(path=[str(site)])]
    return [(canonicalize_name(name), distribution) for name, distribution in named if name]


def remove(path: Path, root: Path) -> None:
    """Removes a file below the root, its bytecode, and the folders that become empty."""
    if not path.is_relative_to(root):
        return
    for file in (path, *path.parent.glob(f"__pycache__/{path.stem}.*.pyc")):
        file.unlink(missing_ok=True)
    for folder in (path.parent / "__pycache__", *path.parents):
        if not folder.is_dir():
            continue
        if any(folder.iterdir()):
            break
        folder.rmdir()


def prune(trimmed: Trimmed, variant: Variant) -> list[dict[str, Any]]:
    """Removes the files that the patterns match, like the build of an image. Returns a row per pattern."""
    rows = []
    for pattern in variant.prune:
        files = size = 0
        for site in trimmed.copies:
            up = pattern.count("../")
            for path in list((site.parents[up - 1] if up else site).glob(pattern[3 * up :])):
                inside = [file for file in path.rglob("*") if not file.is_dir()] if path.is_dir() else [path]
                files += len(inside)
                size += sum(file.lstat().st_size for file in inside)
                trimmed.removed |= {os.path.relpath(file, site) for file in inside}
                if path.is_dir():
                    trimmed.folders.add(os.path.relpath(path, site))
                    shutil.rmtree(path)
                else:
                    path.unlink()
        rows.append({"pattern": pattern, "files": files, "bytes": size})
    return rows


def compare(trimmed: Trimmed, lock: Lock) -> dict[str, Any]:
    """Compares this host's packages with the variant's lock."""
    installed_versions: dict[str, str] = {}
    for site in trimmed.copies:
        for name, distribution in installed(site):
            installed_versions.setdefault(name, distribution.version)
    locked = lock.versions
    shared = locked.keys() & installed_versions.keys()
    return {
        "locked": len(locked),
        "same": sum(locked[name] == installed_versions[name].partition("+")[0] for name in shared),
        "other": {
            name: f"{installed_versions[name]}, not {locked[name]}"
            for name in sorted(shared)
            if locked[name] != installed_versions[name]
        },
        "absent": sorted(locked.keys() - installed_versions.keys()),
    }


def perform(task: str, trimmed: Trimmed, job: Path, cpu: bool, folder: Path, end: float) -> dict[str, Any]:
    """The row of one task, run in a separate process."""
    order, answer, log = (folder / f"{task}.{suffix}" for suffix in ("order", "json", "log"))
    facts = {
        "sources": [str(source) for source in trimmed.sources],
        "copies": [str(site) for site in trimmed.copies],
        "removed": sorted(trimmed.removed),
        "folders": sorted(trimmed.folders),
        "job": str(job),
        "answer": str(answer),
        "cpu": cpu,
    }
    order.write_text(json.dumps(facts))
    start = time.monotonic()
    limit = min(TASKS[task], end - start)
    if limit < 5:
        return {"task": task, "ok": False, "error": "no time was left"}
    command = [trimmed.python, "-m", "benchmarks.gpu.trimmed.tasks", task, order]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=trimmed.environment(), stdout=output, stderr=output, start_new_session=True
        )
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            stop(process.pid)
            process.wait()
    row = {"task": task, "ok": status == 0, "seconds": round(time.monotonic() - start, 1)}
    row |= json.loads(answer.read_text()) if answer.is_file() else {}
    if status != 0:
        text = log.read_text(errors="replace")
        words = [line for line in text.splitlines() if line.strip()]
        row["error"] = f"not done after {limit:.0f} s" if status is None else (words or ["no word"])[-1][:400]
        row["missing"] = sorted(path for path in trimmed.removed if named_in(path, text))
    return row


def named_in(path: str, text: str) -> bool:
    """Whether a text names the file: the linker prints library names, Python whole paths."""
    return path in text or (".so" in path and Path(path).name in text)


def stop(group: int) -> None:
    """Ends the session of a task, including Ray's and vLLM's processes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("sites", nargs="*", type=Path, help="folders of packages, the first found first; else Python's")
    parser.add_argument("--variant", help="of images/matrix.toml; else the target's default")
    parser.add_argument("--into", type=Path, default=Path("/tmp/slipway-trimmed"), help="where the copy lies")
    parser.add_argument("--logs", type=Path, help="where the tasks' words go; else beside the copy")
    parser.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--cpu", action="store_true", help="rehearse without a GPU, with the cpu variant")
    options = parser.parse_args()
    end = time.monotonic() + DEADLINE
    results = Results(options.out, "trimmed")
    matrix = load_matrix(ROOT)
    variant = matrix.variant("cpu" if options.cpu else "cuda", options.variant)
    folder = (options.logs or options.into / "logs").resolve()
    shutil.rmtree(options.into, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)

    start = time.monotonic()
    sources = [site.resolve() for site in options.sites] or package_folders()
    trimmed, counts = copy(sources, options.into.resolve())
    left_out = leave_out(trimmed, variant)
    patterns = prune(trimmed, variant)
    results.add(
        variant=variant.identifier,
        sources=list(map(str, sources)),
        **counts,
        seconds=round(time.monotonic() - start, 1),
        excluded_found=left_out,
        patterns=len(patterns),
        patterns_without_match=[row["pattern"] for row in patterns if not row["files"]],
        pruned_files=sum(row["files"] for row in patterns),
        pruned_bytes=sum(row["bytes"] for row in patterns),
        by_pattern={row["pattern"]: [row["files"], row["bytes"]] for row in patterns if row["files"]},
    )
    results.add(variant=variant.identifier, lock=compare(trimmed, find_lock(matrix, variant)))

    job = write_job(options.into.resolve() / "job", "tiny", 64, prompts=64)
    workers = max(1, (os.cpu_count() or 1) // 4)
    with ThreadPoolExecutor(workers) as pool:
        # The longest first.
        order = sorted(options.only, key=lambda task: -TASKS[task])
        futures = [pool.submit(perform, task, trimmed, job, options.cpu, folder, end) for task in order]
        rows = []
        for future in futures:
            rows.append(future.result())
            results.add(variant=variant.identifier, **rows[-1])
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
