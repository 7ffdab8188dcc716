"""Certificates for a server on loopback, and for who calls it."""

from pathlib import Path

import trustme

from openbook.config import ClientTls, ServerTls


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
