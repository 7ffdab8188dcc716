"""Certificates of an index server and of its clients are replaced while both go on: nobody is started again."""

import asyncio
import logging
import socket
import ssl
from pathlib import Path
from time import monotonic

import pytest
import trustme
from certificates import issue, tls_files
from small_snapshot import VECTORS, build

from openbook.config import ClientTls, IndexServerSettings
from openbook.core.context import Context
from openbook.core.deadline import Deadline
from openbook.core.types import RetrievalSettings
from openbook.errors import ShardUnavailable
from openbook.index.client.client import IndexClient, channel_credentials
from openbook.index.client.sharded import ShardedIndex
from openbook.index.server.server import IndexServer

TIMEOUT_S = 60.0


async def search(index: ShardedIndex) -> None:
    context = Context(Deadline.after(TIMEOUT_S))
    assert (await index.search(VECTORS[:1], RetrievalSettings(k=3), context)).ids.shape == (1, 3)


def trusts(tls: ClientTls, *authorities: trustme.CA) -> None:
    tls.ca.write_bytes(b"".join(each.cert_pem.bytes() for each in authorities))


def shown(address: str, *authorities: trustme.CA) -> bytes:
    """The certificate of who is asked now. Raises ssl.SSLError: none of these signed it."""
    context = ssl.create_default_context(cadata="".join(each.cert_pem.bytes().decode() for each in authorities))
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), TIMEOUT_S) as plain,
        context.wrap_socket(plain, server_hostname=host) as connection,
    ):
        return connection.getpeercert(binary_form=True) or b""


def test_a_new_authority_takes_over_and_no_call_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tls, trusted = tls_files(tmp_path)
    old, new = trustme.CA(), trustme.CA()
    issue(tmp_path, old)
    trusts(trusted, old)

    async def run() -> None:
        server = IndexServer(IndexServerSettings(snapshot=build(tmp_path), tls=tls))
        server.start()
        index = ShardedIndex([server.address], 10.0, tls=trusted)
        await index.connect()
        over, n_found = asyncio.Event(), 0

        async def go_on() -> None:
            nonlocal n_found
            while not over.is_set():
                await search(index)
                n_found += 1

        asking = asyncio.create_task(go_on())
        former = await asyncio.to_thread(shown, server.address, old)

        whole = tls.certificate.read_bytes()
        tls.certificate.write_bytes(whole[: len(whole) // 2])
        assert await asyncio.to_thread(shown, server.address, old) == former, "half a file changes nothing"
        assert "the former certificate goes on" in caplog.text

        trusts(trusted, old, new)
        issue(tmp_path, new)
        assert await asyncio.to_thread(shown, server.address, new) != former
        with pytest.raises(ssl.SSLCertVerificationError):
            await asyncio.to_thread(shown, server.address, old)
        late = IndexClient(server.address, channel_credentials(trusted))
        assert (await late.info(TIMEOUT_S)).snapshot_id == index.snapshot_id
        await late.close()
        before = n_found
        while n_found < before + 3:  # on the connection that was there
            await asyncio.wait([asking], timeout=0.01)
            assert not asking.done()
        over.set()
        await asking

        # The connection ends, and the next one is made by a client who began under the old authority alone.
        port = server.port
        await asyncio.to_thread(server.stop)
        with IndexServer(IndexServerSettings(snapshot=tmp_path / "snapshot", port=port, tls=tls)):
            give_up = monotonic() + TIMEOUT_S
            while True:
                try:
                    await search(index)
                    break
                except ShardUnavailable:
                    assert monotonic() < give_up
                    await asyncio.sleep(0.05)  # until it is probed
            await index.close()

    with caplog.at_level(logging.INFO):
        asyncio.run(run())


def test_who_may_ask_changes_with_the_file(tmp_path: Path) -> None:
    """Mutual TLS: the clients' authority is replaced at the server, then the certificate at the client."""
    tls, trusted = tls_files(tmp_path)
    clients = tmp_path / "clients"
    clients.mkdir()
    first, second = trustme.CA(), trustme.CA()
    first.cert_pem.write_to_path(clients / "ca.pem")
    issue(clients, first)
    server_tls = tls.model_copy(update={"client_ca": clients / "ca.pem"})
    holder = ClientTls(ca=trusted.ca, certificate=clients / "cert.pem", key=clients / "key.pem")

    async def run() -> None:
        with IndexServer(IndexServerSettings(snapshot=build(tmp_path), tls=server_tls)) as server:
            client = IndexClient(server.address, channel_credentials(holder))
            await client.info(TIMEOUT_S)
            second.cert_pem.write_to_path(clients / "ca.pem")
            await client.info(TIMEOUT_S)  # it is in
            await client.reset()
            with pytest.raises(ShardUnavailable):
                await client.info(TIMEOUT_S)
            issue(clients, second)
            await client.reset()
            await client.info(TIMEOUT_S)
            await client.close()

    asyncio.run(run())
