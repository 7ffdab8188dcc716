"""Ports that are handed out: whoever is given one may take seconds to listen there."""

from openbook.processes import free_port, free_ports


def test_no_port_is_given_twice_though_nobody_listens_there_yet() -> None:
    ranges = [range(first, first + 100) for first in (free_ports(100) for _ in range(20))]
    given = [port for ports in ranges for port in ports] + [free_port() for _ in range(40)]
    assert len(set(given)) == len(given)
