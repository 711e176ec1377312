"""The S3 server of the tests and the demo itself."""

from __future__ import annotations

import socket

import pytest

from forebay.benchmarks import seaweed
from forebay.core.errors import StoreUnreachable


@pytest.mark.parametrize("taken_at_first", [1, 99])
def test_a_port_that_somebody_took_meanwhile(monkeypatch: pytest.MonkeyPatch, taken_at_first: int):
    asked, free_ports = [], seaweed.free_ports
    with socket.create_server(("127.0.0.1", 0)) as taken:

        def ports(count: int) -> list[int]:
            asked.append(count)
            found = free_ports(count)
            if len(asked) <= taken_at_first:
                found[6] = taken.getsockname()[1]
            return found

        monkeypatch.setattr(seaweed, "free_ports", ports)
        if taken_at_first == 1:
            with seaweed.running_server() as server:
                assert len(asked) == 2 and server.port != taken.getsockname()[1]
        else:
            with pytest.raises(StoreUnreachable), seaweed.running_server():
                pass
            assert len(asked) == 3
