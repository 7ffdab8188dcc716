"""What keeps the endpoint from starting is told before anything is started. More of it in `test_serve_protocols`."""

import os
import socket

import pytest

from openbook.config import ServingSettings
from openbook.errors import InvalidConfig, PortInUse
from openbook.processes import free_port
from openbook.serving.app import build
from openbook.serving.launch import run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_arguments_are_checked_before_anything_is_deployed() -> None:
    with pytest.raises(InvalidConfig, match=r"serve args: serving\.topologie: no such key"):
        build({"serving": {"topologie": "split"}})
    with pytest.raises(InvalidConfig, match=r"index\.addresses or index\.discover must name at least one server"):
        build({"cache": {"url": "redis://127.0.0.1"}, "access": {"allow_anonymous": True}})
    with pytest.raises(InvalidConfig, match=r"cache\.url must name a Redis server"):
        build({"index": {"addresses": ["127.0.0.1:7000"]}, "access": {"allow_anonymous": True}})


def test_an_address_of_ipv6_is_refused_by_name() -> None:
    with pytest.raises(InvalidConfig, match=r"serving\.host must be a name or an IPv4 address, got ::1"):
        run.local_serve(ServingSettings(host="::1"), num_cpus=1).__enter__()


@pytest.mark.parametrize("name", ["http_port", "grpc_port"])
def test_a_used_port_is_named_before_anything_starts(name: str) -> None:
    before = dict(os.environ)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = {"http_port": free_port(), "grpc_port": free_port(), name: taken.getsockname()[1]}
        serve = run.local_serve(ServingSettings(**ports), num_cpus=1)
        with pytest.raises(PortInUse, match=rf"serving\.{name} = {ports[name]} on 127\.0\.0\.1"):
            serve.__enter__()
    assert dict(os.environ) == before
