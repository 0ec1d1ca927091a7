"""`buildkit publish` and `buildkit verify` on the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from buildkit.commands.publish import chosen_variants
from buildkit.errors import RegistryError
from buildkit.publishing.check import check_published
from buildkit.publishing.release import Tags
from buildkit.recipe.matrix import load_matrix
from buildkit.registry.client import Registry
from buildkit.registry.signature import Trust
from tests.publish.conftest import ROOT, Server, docker_config, push_image


def buildkit(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from buildkit.cli import main; main()", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_dry_run_prints_tags_and_attachments() -> None:
    done = buildkit("publish", "--target", "cpu", "--registry", "localhost:5000/slipway", "--key", "k", "--dry-run")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["repository"] == "localhost:5000/slipway"
    assert plan["tags"][-1] == "cpu"
    assert plan["staging"] == "staging-" + plan["tags"][0]
    assert set(plan["attachments"]) == {"cyclonedx", "spdx", "provenance"}


def test_a_release_has_all_targets_each_once() -> None:
    place = ("--registry", "localhost:5000/slipway", "--key", "k", "--dry-run")
    release = json.loads(buildkit("publish", "-t", "cpu", "-t", "rocm:rocm-debian", *place).stdout)
    assert [image["tags"][-1] for image in release] == ["cpu", "rocm-rocm-debian"]
    twice = buildkit("publish", "-t", "cpu", "-t", f"cpu:{release[0]['variant']}", *place)
    assert json.loads(twice.stdout) == release[0]
    matrix = load_matrix(ROOT)
    assert chosen_variants(matrix, ["all"], None) == [target.default for target in matrix.targets.values()]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["publish", "--target", "cpu", "--registry", "localhost/slipway"], "no signing method"),
        (["publish", "--target", "cpu", "--registry", "localhost/slipway", "--key", "k", "--keyless"], "exclude"),
        (["publish", "--target", "cpu", "--registry", "localhost/slipway:tag", "--key", "k"], "names a tag"),
        (["publish", "--target", "cpu", "--registry", "slipway", "--key", "k"], "names no image"),
        (["publish", "--target", "gpu", "--registry", "localhost/slipway", "--key", "k"], "there is no target"),
        (["publish", "-tcpu", "-trocm", "--variant=v", "--registry=localhost/s", "--key=k"], "belongs to one --target"),
        (["publish", "-tcpu:v", "--variant=v", "--registry=localhost/s", "--key=k"], "belongs to one --target"),
        (["publish", "-tcpu", "--registry=localhost/s", "--key=k", "--compression=zstd-lazy"], "read estargz"),
        (["verify", "--published", "localhost/slipway", "--key", "k"], "names no tag or digest"),
        (["verify", "--published", "localhost/slipway:a", "--key", "k", "--variant", "v"], "--variant needs --target"),
        (["verify", "--published", "localhost/slipway:cpu"], "exactly one trusted signer"),
        (["sbom", "--target", "cpu", "--format", "swid"], "there is no format"),
    ],
)
def test_bad_arguments_are_a_usage_error(arguments: list[str], words: str) -> None:
    done = buildkit(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "hint:" in done.stderr
    assert done.stdout == ""


def test_verify_prints_the_digest_to_use(released: tuple[Registry, Tags], own_server: Server, keys: Path) -> None:
    registry, tags = released
    reference = registry.reference.tagged(tags.version)
    place = ["--registry-ca", str(own_server.ca), "--key", str(keys / "cosign.pub")]
    done = buildkit("verify", "--published", str(reference), *place)
    assert done.returncode == 0, done.stderr
    manifest = registry.manifest(tags.version)
    assert manifest
    assert done.stdout.strip() == str(reference.at(manifest.descriptor.digest))

    report = json.loads(buildkit("verify", "--published", str(reference), *place, "--json").stdout)
    assert report["passed"]
    assert report["digest"] == manifest.descriptor.digest


def test_verify_exits_with_23_when_nothing_was_judged(
    released: tuple[Registry, Tags], own_server: Server, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without cosign, with a key that cannot be read, or with a registry that cosign does not reach."""
    registry, tags = released
    verify = ("verify", "--published", str(registry.reference.tagged(tags.version)), "--registry-ca")
    done = buildkit(*verify, str(own_server.ca), "--key", str(tmp_path / "absent.pub"))
    assert done.returncode == 23
    assert "cosign could not look for a signature" in done.stderr
    assert "no such file" in done.stderr
    assert "the image was not judged" in done.stderr
    monkeypatch.setenv("PATH", str(tmp_path))
    done = buildkit(*verify, str(own_server.ca), "--key", str(keys / "cosign.pub"))
    assert done.returncode == 23
    assert "cosign is not installed" in done.stderr
    assert "do not use this image" not in done.stderr


def test_verify_exits_with_20_when_the_registry_ends_in_between(
    released: tuple[Registry, Tags], own_server: Server, trust: Trust, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, tags = released
    monkeypatch.setattr("buildkit.publishing.check.check_labels", lambda _image: own_server.kill())
    with pytest.raises(RegistryError, match="did not answer"):
        check_published(registry, tags.version, trust, own_server.ca)


def test_verify_compares_the_asked_target_and_variant(
    released: tuple[Registry, Tags], own_server: Server, keys: Path
) -> None:
    registry, _ = released
    place = ["--registry-ca", str(own_server.ca), "--key", str(keys / "cosign.pub"), "--quick"]
    verify = ("verify", "--published", str(registry.reference.tagged("cpu")), *place)
    assert buildkit(*verify, "--target", "cpu", "--variant", "small").returncode == 0
    for asked in (["--target", "cuda"], ["--target", "cpu", "--variant", "other"]):
        done = buildkit(*verify, *asked)
        assert done.returncode == 24
        assert f"and not as {'-'.join(asked[1::2])}" in done.stderr


def test_verify_exits_with_24_for_another_image(
    released: tuple[Registry, Tags], own_server: Server, keys: Path
) -> None:
    registry, _ = released
    push_image(registry, "cpu", labels={"dev.slipway.lock": "sha256:0"})
    reference = str(registry.reference.tagged("cpu"))
    place = ["--registry-ca", str(own_server.ca), "--key", str(keys / "cosign.pub")]
    done = buildkit("verify", "--published", reference, *place)
    assert done.returncode == 24
    assert done.stdout == ""
    assert "signature" in done.stderr
    assert not json.loads(buildkit("verify", "--published", reference, *place, "--json").stdout)["passed"]


def test_wrong_password_is_found_before_anything_is_built(
    own_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: Path
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(docker_config(tmp_path, own_server.host, "wrong")))
    place = ["--registry-ca", str(own_server.ca), "--key", str(keys / "cosign.key")]
    done = buildkit("publish", "--target", "cpu", "--registry", f"{own_server.host}/slipway", *place)
    assert done.returncode == 20
    assert "refuses POST" in done.stderr
    assert f"docker login {own_server.host}" in done.stderr


def test_unusable_key_is_found_before_anything_is_built(own_server: Server, own_login: None, tmp_path: Path) -> None:
    place = ["--registry-ca", str(own_server.ca), "--key", str(tmp_path / "absent.key")]
    done = buildkit("publish", "--target", "cpu", "--registry", f"{own_server.host}/slipway", *place)
    assert done.returncode == 23
    assert "cosign generate-key-pair" in done.stderr
