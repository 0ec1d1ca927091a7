import json
import re
from pathlib import Path

import pytest

from buildkit.errors import MatrixError
from buildkit.images.build import image_tags
from buildkit.recipe.dockerfile import image_labels, image_manifest, render_dockerfile
from buildkit.recipe.lock import Deb, Lock, parse_lock
from buildkit.recipe.matrix import Matrix, load_matrix

LOCKED = "torch==1.0 \\\n  --hash=sha256:00\nray[default]==2.0 \\\n"


def dockerfile(matrix: Matrix, target: str, provider: str) -> str:
    variant = matrix.variant(target)
    manifest = image_manifest(matrix, variant, provider, Lock())
    return render_dockerfile(matrix, variant, provider, image_labels(matrix, variant, manifest))


@pytest.mark.parametrize("target", ["cpu", "cuda", "rocm"])
def test_every_target_renders_a_complete_dockerfile(matrix: Matrix, target: str) -> None:
    text = dockerfile(matrix, target, "registry")
    assert text.count("\nFROM ") == 3
    assert 'ENTRYPOINT ["tini", "-g", "--", "launch"]' in text
    assert "STOPSIGNAL SIGTERM" in text
    assert "{{" not in text
    assert "{%" not in text


def test_bootstrap_base_needs_no_registry(matrix: Matrix) -> None:
    text = dockerfile(matrix, "cpu", "bootstrap")
    assert "FROM scratch AS base" in text
    assert "debian:" not in "".join(line for line in text.splitlines() if line.startswith("FROM"))


def test_code_comes_after_the_wheels(matrix: Matrix) -> None:
    text = dockerfile(matrix, "cpu", "bootstrap")
    assert text.index("install-wheels 3.11") < text.index("COPY app")


def test_images_share_downloads_of_the_same_wheels_alone(matrix: Matrix) -> None:
    """The code of a wheel may run in a build, as root: what it puts among the downloads must not reach other images."""

    def caches(target: str, lock: Lock) -> list[str]:
        text = render_dockerfile(matrix, matrix.variant(target), "registry", {}, lock)
        return re.findall(r"--mount=type=cache,id=(slipway-uv-\w+),", text)

    locked = parse_lock(f"torch==1.0 --hash=sha256:{'1' * 64}\nsix==1.0 --hash=sha256:{'2' * 64}\n")
    another = parse_lock(f"torch==1.0 --hash=sha256:{'1' * 64}\nsix==1.0 --hash=sha256:{'3' * 64}\n")
    assert len(caches("cpu", locked)) == len(matrix.wheel_layers)
    assert caches("cpu", locked) == caches("cuda", locked)
    changed = [before != after for before, after in zip(caches("cpu", locked), caches("cpu", another), strict=True)]
    assert changed == [False, False, True]


def test_template_error_names_template_and_line(project: Path) -> None:
    templates = project / "images" / "templates"
    templates.unlink()
    templates.mkdir()
    (templates / "Dockerfile.j2").write_text("FROM scratch\nRUN {{ nothing.here }}\n")
    matrix = load_matrix(project)
    with pytest.raises(MatrixError) as caught:
        render_dockerfile(matrix, matrix.variant("cpu"), "registry", {})
    assert "Dockerfile.j2, line 2" in str(caught.value)
    assert "nothing" in str(caught.value)


def test_manifest_is_json_with_pins_and_reasons(matrix: Matrix) -> None:
    variant = matrix.variant("cpu")
    manifest = image_manifest(matrix, variant, "bootstrap", parse_lock(LOCKED))
    assert json.loads(json.dumps(manifest))["pins"] == {"torch": "1.0", "ray": "2.0"}
    assert all(manifest["excluded"].values())


def test_tags_carry_the_locks_digest(matrix: Matrix) -> None:
    variant = matrix.variant("cpu")
    tags, other_tags = image_tags(matrix, variant, parse_lock("a")), image_tags(matrix, variant, parse_lock("b"))
    assert tags[:2] == other_tags[:2] == ("slipway:cpu", f"slipway:{variant.identifier}")
    assert tags[2] != other_tags[2]


def test_only_the_default_variant_has_the_targets_own_tag(matrix: Matrix) -> None:
    variant = matrix.variant("rocm", "rocm-debian")
    assert "slipway:rocm" not in image_tags(matrix, variant, Lock())


@pytest.mark.parametrize("target", ["cpu", "cuda", "rocm"])
def test_every_variant_renders_with_each_of_its_providers(matrix: Matrix, target: str) -> None:
    for variant in matrix.targets[target].variants.values():
        for provider in variant.base.providers:
            assert "ENTRYPOINT" in render_dockerfile(matrix, variant, provider, {})


def test_an_image_with_another_base_than_the_locked_one_says_so_and_has_no_tag_of_the_lock(matrix: Matrix) -> None:
    variant = matrix.variant("cpu")
    lock = parse_lock(f"# deb: tini 1 sha256:{'1' * 64}\n")
    changed = lock.with_packages((Deb("tini", "2", "2" * 64),))
    manifests = [image_manifest(matrix, variant, "bootstrap", pinned) for pinned in (lock, changed)]
    assert [manifest["base"]["changes"] for manifest in manifests] == [
        [],
        [{"package": "tini", "locked": "1", "installed": "2"}],
    ]
    labels = [image_labels(matrix, variant, manifest) for manifest in manifests]
    assert [label.get("dev.slipway.base.changes") for label in labels] == [None, "tini 1 -> 2"]
    assert labels[0]["dev.slipway.lock"] == labels[1]["dev.slipway.lock"]
    kept = image_tags(matrix, variant, changed)
    assert image_tags(matrix, variant, lock) == (*kept, f"slipway:{variant.identifier}-{lock.digest[:12]}")


def test_a_base_from_a_registry_uses_the_locked_digest(matrix: Matrix) -> None:
    lock = Lock(
        base="debian:bookworm-slim", base_digest=f"sha256:{'1' * 64}", debs=(Deb("tini", "0.19.0-1", "2" * 64),)
    )
    text = render_dockerfile(matrix, matrix.variant("cpu"), "registry", {}, lock)
    assert f"FROM debian:bookworm-slim@sha256:{'1' * 64} AS vendor" in text


def test_a_debug_image_has_its_own_name_lock_and_environment(matrix: Matrix) -> None:
    plain, debug = matrix.variant("cpu"), matrix.variant("cpu", with_debug=True)
    assert debug == matrix.variant("cpu", f"{plain.name}-debug")
    assert set(debug.packages) - set(plain.packages) == {"gdb"}
    assert "slipway:cpu" not in image_tags(matrix, debug, Lock())
    assert "RAY_DEBUG_POST_MORTEM=1" in render_dockerfile(matrix, debug, "bootstrap", {})
    assert "RAY_DEBUG_POST_MORTEM" not in render_dockerfile(matrix, plain, "bootstrap", {})
