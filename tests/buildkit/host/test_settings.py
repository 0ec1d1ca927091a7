import os
import re
from pathlib import Path

import pytest
import trustme

from buildkit.errors import SettingsError
from buildkit.host.certificates import with_system_ca
from buildkit.host.settings import as_shell, read_host

AUTHORITY = trustme.CA().cert_pem.bytes().decode()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "etc/apt/sources.list.d").mkdir(parents=True)
    (tmp_path / "home/.config/pip").mkdir(parents=True)
    return tmp_path


def test_a_bare_host_has_no_settings(root: Path) -> None:
    host = read_host({}, root, root / "home")
    assert host.build_environment("/ca.pem") == {}
    assert (host.ca_bundle, host.find_links, host.local_indexes) == (None, (), ())


def test_pip_files_and_environment_in_pips_order(root: Path) -> None:
    (root / "etc/pip.conf").write_text("[global]\nindex-url = https://one.example/simple\ntrusted-host = one.example\n")
    (root / "home/.config/pip/pip.conf").write_text("[global]\nindex-url = https://two.example/simple\n")
    assert read_host({}, root, root / "home").default_index == "https://two.example/simple"
    environ = {"PIP_INDEX_URL": "https://three.example/simple"}
    host = read_host(environ, root, root / "home")
    assert host.default_index == "https://three.example/simple"
    assert host.trusted_hosts == ("one.example",)


def test_uvs_own_variables_win(root: Path) -> None:
    environ = {"UV_DEFAULT_INDEX": "https://uv.example/simple", "PIP_INDEX_URL": "https://pip.example/simple"}
    assert read_host(environ, root, root / "home").default_index == "https://uv.example/simple"


def test_local_directories_do_not_enter_the_build_environment(root: Path) -> None:
    environ = {
        "PIP_EXTRA_INDEX_URL": "file:///srv/simple https://more.example/simple",
        "PIP_FIND_LINKS": "/srv/wheels https://links.example/",
    }
    host = read_host(environ, root, root / "home")
    assert host.local_indexes == (Path("/srv/simple"),)
    assert host.wheel_folders == (Path("/srv/wheels"),)
    values = host.build_environment("/ca.pem")
    assert values == {"UV_INDEX": "https://more.example/simple", "UV_FIND_LINKS": "https://links.example/"}


def test_ca_bundle_and_proxies_pass_through(root: Path) -> None:
    bundle = root / "ca.pem"
    bundle.write_text(AUTHORITY)
    host = read_host({"SSL_CERT_FILE": str(bundle), "https_proxy": "http://proxy.example:3128"}, root, root / "home")
    assert host.ca_bundle == bundle
    assert host.build_environment("/in/build.pem") == {
        "SSL_CERT_FILE": "/in/build.pem",
        "https_proxy": "http://proxy.example:3128",
    }


def test_apt_sources_of_debian_are_read(root: Path) -> None:
    (root / "etc/apt/sources.list.d/debian.sources").write_text("Types: deb\nSuites: bookworm\n")
    (root / "etc/apt/sources.list.d/other.sources").write_text("Types: deb\nSuites: other\n")
    assert "bookworm" in read_host({}, root, root / "home").apt_sources
    assert "other" not in read_host({}, root, root / "home").apt_sources


def test_uvs_files_come_before_what_pip_is_told(root: Path) -> None:
    (root / "etc/pip.conf").write_text("[global]\nindex-url = https://pip.example/simple\n")
    (root / "home/.config/uv").mkdir()
    user = root / "home/.config/uv/uv.toml"
    user.write_text("""
allow-insecure-host = ["one.example"]
[[index]]
url = "https://one.example/simple"
default = true
[[index]]
url = "https://two.example/simple"
[[index]]
name = "three"
url = "https://three.example/simple"
explicit = true
[pip]
find-links = ["/srv/wheels"]
""")
    host = read_host({}, root, root / "home")
    assert (host.default_index, host.indexes) == ("https://one.example/simple", ("https://two.example/simple",))
    assert (host.find_links, host.trusted_hosts) == (("/srv/wheels",), ("one.example",))
    assert read_host({"UV_NO_CONFIG": "1"}, root, root / "home").default_index == "https://pip.example/simple"
    assert read_host({"UV_INDEX": "four=https://four.example"}, root, root / "home").indexes == (
        "https://four.example",
    )


def test_an_empty_pip_config_file_turns_pips_files_off(root: Path) -> None:
    (root / "etc/pip.conf").write_text("[global]\nindex-url = https://pip.example/simple\n")
    assert read_host({"PIP_CONFIG_FILE": "/dev/null"}, root, root / "home").default_index is None


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("etc/pip.conf", b"index-url = https://user:secret@one.example\n"),
        ("etc/pip.conf", b"[global]\n= secret\n"),
        ("etc/pip.conf", b"[global]\ncert = a\ncert = secret\n"),
        ("etc/pip.conf", b"[global]\nindex-url = https://[secret\n"),
        ("etc/pip.conf", b"[global]\ncert = " + b"secret" * 1000),
        ("home/.config/pip/pip.conf", b"\xff\xfe[global]"),
        ("home/.config/uv/uv.toml", b"index-url = ['https://secret']\n"),
        ("home/.config/uv/uv.toml", b"[[index]]\nname = 'secret'\n"),
        ("home/.config/uv/uv.toml", b"index-url = 'secret\n"),
        ("home/.config/uv/uv.toml", b"find-links = 'secret'\n"),
        ("home/.config/uv/uv.toml", b"\xff"),
        ("etc/apt/sources.list.d/debian.sources", b"Types: deb\n\xff"),
    ],
)
def test_a_malformed_file_is_named_without_its_content(root: Path, file: str, content: bytes) -> None:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    with pytest.raises(SettingsError) as caught:
        read_host({}, root, root / "home")
    message = f"{caught.value}\n{caught.value.hint}"
    assert "user:secret" not in message
    assert str(path) in message or "secret" in content.decode(errors="replace")


@pytest.mark.parametrize("content", [b"", b"PRIVATE", b"\x30\x82\x01", b"-----BEGIN CERTIFICATE-----\nAAAA\n"])
def test_certificates_that_are_none_are_refused(root: Path, content: bytes) -> None:
    bundle = root / "ca.pem"
    bundle.write_bytes(content)
    for read in (lambda: read_host({"SSL_CERT_FILE": str(bundle)}, root, root), lambda: with_system_ca(bundle, root)):
        with pytest.raises(SettingsError, match=re.escape(str(bundle))):
            read()


def test_a_named_file_of_certificates_that_is_absent_is_refused(root: Path) -> None:
    with pytest.raises(SettingsError, match="PIP_CERT names /nowhere, which is no file"):
        read_host({"PIP_CERT": "/nowhere"}, root, root)


@pytest.mark.skipif(os.getuid() == 0, reason="root reads every file")
def test_a_file_that_nobody_may_read_is_named(root: Path) -> None:
    (root / "etc/pip.conf").write_text("[global]\n")
    (root / "etc/pip.conf").chmod(0)
    with pytest.raises(SettingsError, match="Permission denied"):
        read_host({}, root, root / "home")


def test_shell_text_is_quoted() -> None:
    assert as_shell({"B": "two words", "A": "$(x)"}) == "A='$(x)'\nB='two words'\n"


def test_a_private_authority_is_added_to_the_systems(root: Path) -> None:
    """In place of them, it would refuse every public index."""
    private = root / "private.pem"
    private.write_text(AUTHORITY)
    assert with_system_ca(private, root) == AUTHORITY
    system = root / "etc/ssl/certs/ca-certificates.crt"
    system.parent.mkdir(parents=True)
    system.write_text("PUBLIC")
    assert with_system_ca(private, root) == f"PUBLIC\n{AUTHORITY}"
    assert with_system_ca(system, root) == "PUBLIC"
