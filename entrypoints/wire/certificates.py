"""Certificates for TLS between the nodes' Ray processes, made for one job.

The head is the job's certificate authority. Each node makes its own key, which never leaves it, and asks for a
certificate for its addresses in its hello, and the head signs it.
"""

import datetime
import ipaddress
from collections.abc import Mapping, Sequence
from pathlib import Path

from entrypoints.errors import RayFailedError

try:
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID
except ImportError as error:
    raise RayFailedError(
        "--tls needs the Python package cryptography, which is not installed",
        "use the image, or `pip install 'slipway-rl[tls]'`",
    ) from error

_EARLY = datetime.timedelta(hours=1)
"""Certificates are valid from before now, as the nodes' clocks differ."""
_LIFE = datetime.timedelta(days=365)
_LOOPBACK = ("127.0.0.1", "::1")
_KEY, _CERTIFICATE, _AUTHORITY = "key.pem", "certificate.pem", "authority.pem"


class NodeKey:
    """A node's new private key."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())

    def request(self, addresses: Sequence[str]) -> str:
        """A signing request for a certificate of a host with these addresses, and loopback, as PEM."""
        addresses_here = [
            x509.IPAddress(ipaddress.ip_address(address)) for address in dict.fromkeys((*addresses, *_LOOPBACK))
        ]
        names = x509.SubjectAlternativeName([x509.DNSName("localhost"), *addresses_here])
        request = x509.CertificateSigningRequestBuilder().subject_name(_name("node"))
        signed = request.add_extension(names, critical=False).sign(self._key, hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM).decode()

    def install(self, certificate: Mapping[str, str], directory: Path) -> dict[str, str]:
        """Write the key and what `Authority.sign` returned into a private directory. Returns variables for Ray."""
        key = directory / _KEY
        key.touch(mode=0o600)
        key.write_bytes(_pem(self._key))
        (directory / _CERTIFICATE).write_text(certificate["certificate"], encoding="ascii")
        (directory / _AUTHORITY).write_text(certificate["authority"], encoding="ascii")
        return {
            "RAY_USE_TLS": "1",
            "RAY_TLS_SERVER_KEY": str(key),
            "RAY_TLS_SERVER_CERT": str(directory / _CERTIFICATE),
            "RAY_TLS_CA_CERT": str(directory / _AUTHORITY),
        }


class Authority:
    """The job's certificate authority, in the head's memory."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        unsigned = _builder("job", self._key.public_key(), "job")
        unsigned = unsigned.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self._certificate = unsigned.sign(self._key, hashes.SHA256())

    def sign(self, request: str) -> dict[str, str]:
        """The `certificate` that a node requests, and that of the `authority`, as PEM. Raises ValueError."""
        try:
            asked = x509.load_pem_x509_csr(request.encode())
            key = asked.public_key()
            names = asked.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            signed = asked.is_signature_valid
        except (ValueError, x509.ExtensionNotFound, UnsupportedAlgorithm) as error:
            raise ValueError(f"it is no certificate request for addresses: {error}") from error
        if not (signed and isinstance(key, ec.EllipticCurvePublicKey)):
            raise ValueError("the certificate request is not signed by its key")
        unsigned = _builder("node", key, "job").add_extension(names, critical=False)
        unsigned = unsigned.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        return {
            "certificate": _text(unsigned.sign(self._key, hashes.SHA256())),
            "authority": _text(self._certificate),
        }


def _builder(subject: str, key: ec.EllipticCurvePublicKey, issuer: str) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLY)
        .not_valid_after(now + _LIFE)
    )


def _name(role: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"slipway {role}")])


def _text(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
