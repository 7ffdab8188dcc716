"""`openbook doctor` before real servers: who holds what, and when their certificates expire."""

from pathlib import Path

from certificates import tls_files
from small_snapshot import build

from openbook.cache.server import RedisServer
from openbook.config import IndexServerSettings, parse
from openbook.doctor.findings import Level
from openbook.doctor.look import index_servers, redis
from openbook.index.server.server import IndexServer


def test_servers_that_make_a_whole_are_well(tmp_path: Path, redis_server: RedisServer) -> None:
    tls, trusted = tls_files(tmp_path, "index.test")
    snapshot = build(tmp_path, n_shards=2)
    at = [IndexServerSettings(snapshot=snapshot, shard=shard, tls=tls) for shard in (0, 1)]
    with IndexServer(at[0]) as first:
        index = {"tls": {"ca": str(trusted.ca)}, "server_name": "index.test", "timeout_s": 60}
        half = parse({"index": {**index, "addresses": [first.address]}})
        assert list(index_servers(half))[-1].says == "nobody serves shard 1 of 2"
        with IndexServer(at[1]) as second:
            settings = parse({"index": {**index, "addresses": [first.address, second.address]}})
            found = {finding.what: finding for finding in index_servers(settings)}
    assert {finding.level for finding in found.values()} == {Level.WELL}
    assert found[f"index server {second.address}"].says.startswith("shard 1 of snapshot ")
    assert found[f"certificate of index server {first.address}"].says.startswith("expires in ")

    settings = parse({"cache": {"url": redis_server.url}})
    told = redis("the cache's Redis", "cache", settings)
    assert (told.level, "clock" in told.says) == (Level.WELL, True)
