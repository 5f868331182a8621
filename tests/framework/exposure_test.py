"""Addresses that other machines can reach are refused unless the user allows them."""

from __future__ import annotations

import socket

import pytest

from tekso.framework import exposure
from tekso.framework.cluster import Cluster

NAMES = {"node1": "192.0.2.1", "debian": "127.0.1.1", "node2": "192.0.2.2", "six": "2001:db8::1"}


@pytest.fixture(autouse=True)
def _known_names(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = socket.getaddrinfo

    def known(host: str, *args: object, **options: object) -> object:
        return resolve(NAMES.get(host, host), *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", known)


@pytest.mark.parametrize("address", ["localhost:1", "127.0.0.1:1", "127.3.2.1:1", "[::1]:1"])
def test_loopback_needs_no_permission(address: str) -> None:
    exposure.check(address, source="--cluster", allowed=False)
    assert "only programs of this machine" in exposure.describe(address)


@pytest.mark.parametrize(
    "address", ["node1:1", "192.0.2.1:1", "0.0.0.0:1", "[::]:1", "[2001:db8::1]:1", "six:1"]
)
def test_address_of_a_network_needs_permission(address: str) -> None:
    with pytest.raises(exposure.ExposureError) as refused:
        exposure.check(address, source="SLURM", allowed=False)
    for word in ("SLURM", address, "no authentication", "--allow_unauthenticated_network"):
        assert word in str(refused.value)
    exposure.check(address, source="SLURM", allowed=True)
    assert "anyone who can connect can run any op" in exposure.describe(address)


def test_name_of_loopback_that_other_machines_cannot_reach_is_refused() -> None:
    found = Cluster(("debian:1", "node2:1"), 0)
    with pytest.raises(exposure.ExposureError, match=r"debian:1 is 127\.0\.1\.1 on this machine"):
        exposure.check(found.address, source="--cluster", allowed=True, others=found.addresses)


def test_unknown_host_is_named() -> None:
    with pytest.raises(exposure.ExposureError, match=r"no address of 'no\.such\.host\.invalid'"):
        exposure.check("no.such.host.invalid:1", source="--cluster", allowed=True)
