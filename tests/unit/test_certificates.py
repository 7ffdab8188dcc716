"""Files of TLS that are replaced: what can be used is, and what cannot leaves things as they were."""

import logging
from pathlib import Path

import pytest
import trustme

from openbook.certificates import Pem, Renewed, read, trusted
from openbook.config import ClientTls, ServerTls
from openbook.errors import InvalidConfig


@pytest.fixture
def tls(tmp_path: Path) -> ServerTls:
    files = ServerTls(certificate=tmp_path / "cert.pem", key=tmp_path / "key.pem", client_ca=tmp_path / "ca.pem")
    ca = trustme.CA()
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    replace(files, ca.issue_cert("a"))
    return files


def replace(tls: ServerTls, issued: trustme.LeafCert) -> None:
    tls.key.write_bytes(issued.private_key_pem.bytes())
    tls.certificate.write_bytes(issued.cert_chain_pems[0].bytes())


def content(tls: ServerTls) -> Pem:
    assert tls.client_ca
    return Pem(tls.certificate.read_bytes(), tls.key.read_bytes(), tls.client_ca.read_bytes())


def test_what_has_not_changed_is_not_made_again(tls: ServerTls) -> None:
    made: list[Pem] = []
    renewed = Renewed("index.tls", tls, made.append)
    assert [renewed.changed() for _ in range(3)] == [False] * 3
    assert made == [content(tls)]
    replace(tls, trustme.CA().issue_cert("b"))
    assert [renewed.changed(), renewed.changed()] == [True, False]
    assert made[1:] == [content(tls)]


@pytest.mark.parametrize("name", ["cert.pem", "key.pem", "ca.pem"])
@pytest.mark.parametrize("half", [True, False])
def test_a_file_that_cannot_be_used_leaves_what_was_there(
    tls: ServerTls, name: str, half: bool, caplog: pytest.LogCaptureFixture
) -> None:
    renewed = Renewed("index_server.tls", tls, lambda pem: pem)
    before = renewed.current
    path = tls.key.with_name(name)
    whole = path.read_bytes()
    if half:
        path.write_bytes(whole[: len(whole) // 2])
    else:
        path.unlink()
    with caplog.at_level(logging.INFO):
        assert [renewed.now(), renewed.now()] == [before, before]
    said = f"index_server.tls: {path}: cannot be read" if not half else "index_server.tls: its files cannot be used"
    assert [message.startswith(said) for message in caplog.messages] == [True], "once, and which"
    path.write_bytes(whole)
    assert renewed.changed()


def test_halves_of_two_pairs_are_not_used(tls: ServerTls) -> None:
    renewed = Renewed("index.tls", tls, lambda pem: pem)
    before, other = renewed.current, trustme.CA().issue_cert("b")
    tls.key.write_bytes(other.private_key_pem.bytes())
    assert renewed.now() == before
    tls.certificate.write_bytes(other.cert_chain_pems[0].bytes())
    assert renewed.now() == content(tls) != before


def test_what_is_written_while_it_is_read_is_looked_at_again(tls: ServerTls, monkeypatch: pytest.MonkeyPatch) -> None:
    renewed = Renewed("index.tls", tls, lambda pem: pem)
    before, second = renewed.current, trustme.CA().issue_cert("second")
    replace(tls, trustme.CA().issue_cert("first"))

    def read_late(section: str, files: ServerTls | ClientTls) -> Pem:
        pem = read(section, files)
        replace(tls, second)
        return pem

    with monkeypatch.context() as patched:
        patched.setattr("openbook.certificates.read", read_late)
        assert renewed.now() == before
    assert renewed.now() == content(tls) != before


def test_it_does_not_begin_with_what_cannot_be_used(tls: ServerTls) -> None:
    tls.key.write_bytes(b"no key")
    with pytest.raises(InvalidConfig, match=r"^serving\.tls: its files cannot be used: "):
        Renewed("serving.tls", tls, lambda pem: pem)
    with pytest.raises(InvalidConfig, match=rf"^index\.tls: {tls.key}x: cannot be read: No such file"):
        read("index.tls", ClientTls(ca=tls.key.with_name("key.pemx")))


def test_what_could_not_be_read_is_once_its_rights_are_put_right(
    tls: ServerTls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root, who runs these tests, may read everything: so that it cannot be read is only said."""
    renewed = Renewed("serving.tls", tls, lambda pem: pem)
    replace(tls, trustme.CA().issue_cert("later"))

    def forbidden(section: str, files: ServerTls | ClientTls) -> Pem:
        raise InvalidConfig("cannot be read: Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr("openbook.certificates.read", forbidden)
        assert not renewed.changed()
    assert not renewed.changed()
    before = tls.key.stat().st_ctime_ns
    while tls.key.stat().st_ctime_ns == before:  # clocks of files go in steps
        tls.key.chmod(0o640)
    assert renewed.changed()
    assert renewed.current == content(tls)


def test_this_machine_trusts_the_authorities_of_its_file_and_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", raising=False)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "some.pem"))
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
    assert trusted() is None, "gRPC has a list of its own"
    for name in ("some.pem", "0123abcd.0", "README"):
        (tmp_path / name).write_text(name)
    (tmp_path / "4567abcd.0").symlink_to("none.pem")
    assert trusted() == b"some.pem\n0123abcd.0"
    (tmp_path / "some.pem").unlink()
    assert trusted() == b"0123abcd.0"
    monkeypatch.setenv("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", "other.pem")
    assert trusted() is None, "gRPC reads it itself"
