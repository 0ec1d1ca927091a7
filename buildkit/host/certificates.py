"""Certificate authorities that this host trusts: the system's, and those that it names."""

import ssl
from collections.abc import Mapping
from pathlib import Path

from buildkit.errors import SettingsError
from buildkit.host.files import is_file, is_folder, settings_text

CA_VARIABLES = ("UV_SSL_CERT_FILE", "PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
SYSTEM_CA = (Path("/etc/ssl/certs/ca-certificates.crt"), Path("/etc/pki/tls/certs/ca-bundle.crt"))


def find_ca(environ: Mapping[str, str], configured: str | None, root: Path) -> Path | None:
    """The file of certificates that a variable or pip's configuration names, else the system's.

    Raises `SettingsError` if a named one is absent or holds no certificate.
    """
    named = [(name, environ[name]) for name in CA_VARIABLES if environ.get(name)]
    for name, value in (*named, *([("pip's `cert`", configured)] if configured else [])):
        path = Path(value)
        if is_file(path):
            if path not in SYSTEM_CA:
                read_certificates(path)
            return path
        if not is_folder(path):  # of hashed certificates, which only requests reads
            raise SettingsError(f"{name} names {value:.200}, which is no file", "name a PEM file of certificates")
    return system_ca(root)


def system_ca(root: Path) -> Path | None:
    return next((path for path in (root / str(path).lstrip("/") for path in SYSTEM_CA) if path.is_file()), None)


def read_certificates(path: Path) -> str:
    """The certificates in a PEM file. Raises `SettingsError` if it holds none, or one that is malformed."""
    text = settings_text(path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise SettingsError(
            f"{path} is no PEM file of certificates", "convert it: `openssl x509 -inform der -in FILE -out FILE.pem`"
        ) from error
    return text


def with_system_ca(named: Path | None, root: Path = Path("/")) -> str:
    """Certificates as PEM: the system's and the named ones, which alone would refuse every public server.

    Raises `SettingsError` for a named file without certificates.
    """
    system = system_ca(root)
    texts = [settings_text(system)] if system else []
    if named and named != system:
        texts.append(read_certificates(named))
    return "\n".join(texts)
