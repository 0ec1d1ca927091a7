"""The third-party notices name the versions of the locks."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_notices_follow_the_locks() -> None:
    done = subprocess.run([sys.executable, ROOT / "ci/notices", "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
