"""`buildkit certify` rehearsed on CPU: the real cpu image, two containers as two ranks, a real signature.

Needs the image and a minute or two, so plain `pytest` does not collect it: `pytest tests/publish/certify_rehearsal.py`.
"""

from pathlib import Path

import pytest

from buildkit.certification.certificate import PREDICATE, read_statement
from buildkit.publishing.dsse import check_signature, open_envelope
from buildkit.recipe.lock_file import find_lock
from buildkit.recipe.matrix import load_matrix
from tests.publish.conftest import ROOT
from tests.publish.test_commands import buildkit


@pytest.mark.timeout(600)
def test_the_cpu_image_is_certified_as_a_rehearsal(tmp_path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSIGN_PASSWORD", "")
    monkeypatch.setenv("SLIPWAY_SIGN_KEY", str(keys / "cosign.key"))
    file = tmp_path / "certificate.json"
    # The whole smoke tests have their own step in ci/test.
    done = buildkit("certify", "--target", "cpu", "--output", str(file), "--", "-k", "exit_code")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{file}\n"
    assert "rehearsed on CPU" in done.stderr

    check_signature(file.read_bytes(), str(keys / "cosign.pub"), PREDICATE)
    certificate = read_statement(open_envelope(file.read_bytes())[0])
    matrix = load_matrix(ROOT)
    assert certificate.rehearsal
    assert certificate.lock == f"sha256:{find_lock(matrix, matrix.variant('cpu')).digest}"
    assert {part.name: part.result for part in certificate.parts} == {
        "smoke tests": "not done",
        "devices": "not done",
        "collectives": "not done",
        "two ranks": "passed",
        "agreement": "passed",
        "weight sync": "passed",
        "sleep and wake": "not done",
    }
    assert all(part.reason for part in certificate.parts if part.result == "not done")
    figures = {part.name: part.figures for part in certificate.parts}
    assert figures["devices"]["matrix_tflops"] > 0
    assert figures["two ranks"]["ranks"] == 2
    assert figures["agreement"]["mean_nats"] < 1e-4  # float32
