from pathlib import Path

import pytest

from buildkit.host.settings import as_shell, read_host, with_system_ca


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
    bundle.write_text("certificate")
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


def test_shell_text_is_quoted() -> None:
    assert as_shell({"B": "two words", "A": "$(x)"}) == "A='$(x)'\nB='two words'\n"


def test_a_private_authority_is_added_to_the_systems(root: Path) -> None:
    """In place of them, it would refuse every public index."""
    private = root / "private.pem"
    private.write_text("PRIVATE")
    assert with_system_ca(private, root) == "PRIVATE"
    system = root / "etc/ssl/certs/ca-certificates.crt"
    system.parent.mkdir(parents=True)
    system.write_text("PUBLIC")
    assert with_system_ca(private, root) == "PUBLIC\nPRIVATE"
    assert with_system_ca(system, root) == "PUBLIC"
