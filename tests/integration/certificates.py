"""Certificates for a server on loopback, and for who calls it."""

import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from openbook.config import ClientTls, ServerTls

DAY = timedelta(days=1)


def tls_files(folder: Path, name: str = "127.0.0.1") -> tuple[ServerTls, ClientTls]:
    """Settings of both sides, whose files are written into the folder."""
    ca = trustme.CA()
    ca.cert_pem.write_to_path(folder / "ca.pem")
    issue(folder, ca, name)
    return ServerTls(certificate=folder / "cert.pem", key=folder / "key.pem"), ClientTls(ca=folder / "ca.pem")


def issue(folder: Path, ca: trustme.CA, name: str = "127.0.0.1") -> None:
    """A new certificate and its key, one file after the other, in place of those that are there."""
    certificate = ca.issue_cert(name)
    certificate.private_key_pem.write_to_path(folder / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(folder / "cert.pem")


def plain(folder: Path) -> trustme.LeafCert:
    """Of 127.0.0.1, without what Python asks for since 3.13: by which key it is signed. Leaves its CA in the folder."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    ours, its = (x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]) for name in ("CA", "server"))
    at = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    more: list[tuple[x509.Name, x509.ExtensionType]] = [(ours, x509.BasicConstraints(True, None)), (its, at)]
    authority, server = (
        x509.CertificateBuilder(ours, subject, key.public_key(), number, now - DAY, now + DAY)
        .add_extension(extension, critical=number == 1)
        .sign(key, hashes.SHA256())
        .public_bytes(Encoding.PEM)
        for number, (subject, extension) in enumerate(more, 1)
    )
    (folder / "ca.pem").write_bytes(authority)
    return trustme.LeafCert(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), server, [])


def by_intermediate(folder: Path) -> trustme.LeafCert:
    """Of 127.0.0.1. Leaves in the folder whose it is, but not who signed that one in turn."""
    authority = trustme.CA().create_child_ca()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    return authority.issue_cert("127.0.0.1")


def strict_as_since_3_13(monkeypatch: pytest.MonkeyPatch) -> None:
    default = ssl.create_default_context

    def strict(*purpose: ssl.Purpose, **options: Any) -> ssl.SSLContext:
        context = default(*purpose, **options)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", strict)
