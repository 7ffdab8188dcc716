"""Certificates for a server on loopback, and for who calls it."""

from pathlib import Path

import trustme

from openbook.config import ClientTls, ServerTls


def tls_files(folder: Path, name: str = "127.0.0.1") -> tuple[ServerTls, ClientTls]:
    """Settings of both sides, whose files are written into the folder."""
    ca = trustme.CA()
    certificate = ca.issue_cert(name)
    ca.cert_pem.write_to_path(folder / "ca.pem")
    certificate.private_key_pem.write_to_path(folder / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    return ServerTls(certificate=folder / "cert.pem", key=folder / "key.pem"), ClientTls(ca=folder / "ca.pem")
