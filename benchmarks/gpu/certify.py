"""The trials of `buildkit certify` with this host's packages, for hosts that cannot run an image.

    python3 -m benchmarks.gpu.certify

Everything but the smoke tests: prints the parts as JSON, and exits with 1 if one failed. It is no certificate, because
there is no image. `benchmarks.gpu.trimmed` shows that an image's packages work. Without a GPU, it rehearses one rank.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

from buildkit.certification import trials
from buildkit.certification.certificate import FAILED

ROOT = Path(__file__).resolve().parents[2]


class HostTrial(trials.Trial):
    """Starts `launch` from this checkout."""

    @property
    def ranks(self) -> int:
        return min(max(self.gpus, 1), 2)

    @property
    def place(self) -> str:
        return str(self.folder)

    def run(self, command: tuple[str, ...], nodes: int = 1, gpus: int | None = None) -> int:
        del nodes  # this host is one
        packages = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": packages, "SLIPWAY_REPORT_DIR": self.place}
        if gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(gpus)))
        words = ["timeout", str(self.seconds_left), sys.executable, "-m", "entrypoints", "--single", *command]
        return subprocess.run(words, cwd=ROOT, env=environment, stdout=trials.STDERR, check=False).returncode


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="slipway-certify-") as folder:
        trial = HostTrial(Path(folder), torch.cuda.device_count())
        parts = [*trials.devices(trial), *trials.training(trial)]
    sys.stdout.write(json.dumps([asdict(part) for part in parts], indent=1) + "\n")
    return int(any(part.result == FAILED for part in parts))


if __name__ == "__main__":
    sys.exit(main())
