"""Where the members of a fleet come from: lists, YAML files and DNS."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path

import pytest

from memsaver_server.fleet import Fleet, Member, MembershipError, Selector, StaticMembership, membership_of
from memsaver_server.fleet.dns_members import DnsMembership
from memsaver_server.fleet.members import Membership
from tests.waiting import wait_until

from .dns_server import Zone


def members(membership: Membership) -> list[Member]:
    return asyncio.run(membership.members())


@pytest.fixture
def zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Zone]:
    """The system asks this DNS server."""
    zone = Zone()
    monkeypatch.setattr("dns.asyncresolver.default_resolver", zone.resolver())
    yield zone
    zone.close()


def test_a_yaml_file(tmp_path: Path) -> None:
    path = tmp_path / "members.yaml"
    path.write_text(
        """
        - http://10.0.0.1:30000
        - {name: b, url: "unix:///run/b", model: qwen, labels: {role: rollout, rank: 1}, gpus: GPU-1, api_key: k}
        """
    )
    first, second = members(membership_of(str(path)))
    assert first == Member("10.0.0.1:30000", "http://10.0.0.1:30000")
    assert astuple(second) == ("b", "unix:///run/b", "qwen", {"role": "rollout", "rank": "1"}, "", ("GPU-1",), "k")
    assert "'k'" not in repr(second)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[", "cannot be read"),
        ("a: b", "is no list of members"),
        ("- {name: a}", "entry 1 is no address"),
        ("- {url: 'http://a:1', colour: red}", "entry 1 is no address"),
        ("- 7", "entry 1 is no address"),
        ("- http://a:1\n- http://a:1", "two members are called 'a:1'"),
        ("- 'http://'", "is not the address of a service"),
        ("- {name: a, url: 'http://é..x:1'}", "member 'a': Invalid IDNA hostname"),
        ("- {url: 'http://a:1', gpus: 5}", "entry 1: gpus is a UUID or a list"),
        ("- {url: 'http://a:1', labels: [1, 2]}", "labels is a mapping"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "members.yaml"
    path.write_text(text)
    with pytest.raises(MembershipError, match=why):
        members(StaticMembership(path))


def test_a_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "members.yaml"
    path.write_text("- http://a:1")

    async def run() -> None:
        membership = StaticMembership(path)
        assert len(await membership.members()) == 1
        changed = asyncio.ensure_future(membership.changed())
        path.write_text("- http://a:1\n- http://b:1")
        await asyncio.wait_for(changed, 30)
        assert len(await membership.members()) == 2
        path.unlink()
        with pytest.raises(MembershipError, match="cannot be read"):
            await membership.members()

    asyncio.run(run())


def test_addresses_of_a_headless_service(zone: Zone) -> None:
    zone.records = "engines.ns 60 A 10.0.0.2\nengines.ns 60 A 10.0.0.1\nengines.ns 60 AAAA fd00::1"
    membership = DnsMembership("engines.ns", 30000)
    assert [(member.name, member.url, member.host) for member in members(membership)] == [
        ("10.0.0.1:30000", "http://10.0.0.1:30000", "10.0.0.1"),
        ("10.0.0.2:30000", "http://10.0.0.2:30000", "10.0.0.2"),
        ("[fd00::1]:30000", "http://[fd00::1]:30000", "fd00::1"),
    ]


def test_services(zone: Zone) -> None:
    zone.records = (
        "_http._tcp.engines 60 SRV 0 10 30000 one.engines\n_http._tcp.engines 60 SRV 0 10 30001 two.engines\n"
        "_http._tcp.engines 60 SRV 0 10 30001 away.engines\none.engines 60 A 10.0.0.1\ntwo.engines 60 AAAA fd00::2"
    )
    membership = DnsMembership("_http._tcp.engines", None)
    assert [(member.name, member.url) for member in members(membership)] == [
        ("one.engines:30000", "http://10.0.0.1:30000"),
        ("two.engines:30001", "http://[fd00::2]:30001"),
    ]


def test_records_count_for_their_time_to_live(zone: Zone, caplog: pytest.LogCaptureFixture) -> None:
    zone.records = "engines 1 A 10.0.0.1\nengines 1 AAAA fd00::1"
    membership = DnsMembership("engines", 1)

    async def run() -> None:
        assert len(await membership.members()) == 2
        zone.records = "other 1 A 10.0.0.1"
        assert len(await membership.members()) == 2
        await asyncio.wait_for(membership.changed(), 30)
        assert not caplog.messages
        assert await membership.members() == []  # no pod is ready

    asyncio.run(run())
    expected = ["DNS has no A or AAAA records of engines: the fleet has no members"]
    wait_until(lambda: caplog.messages == expected)  # a thread may write the log


def test_a_name_that_never_had_records_is_in_the_log_once(zone: Zone, caplog: pytest.LogCaptureFixture) -> None:
    """The fleet was empty, and nothing said why."""
    membership = DnsMembership("_http._tcp.engines", None)
    assert members(membership) == []
    membership._expires = 0.5  # long ago
    assert members(membership) == []
    expected = ["DNS has no SRV records with addresses of _http._tcp.engines: the fleet has no members"]
    wait_until(lambda: caplog.messages == expected)


def test_dns_that_fails_is_told(zone: Zone) -> None:
    zone.broken = True
    with pytest.raises(MembershipError, match="DNS does not return the A"):
        members(DnsMembership("engines", 1))


@pytest.mark.parametrize("source", ["", "dns:engines", "dns::1", "dns:engines:0", "dns:engines:x", "srv:"])
def test_sources_that_name_nothing(source: str) -> None:
    with pytest.raises(ValueError, match="write"):
        membership_of(source)


def test_sources() -> None:
    assert isinstance(membership_of("dns:engines.ns.svc:30000"), DnsMembership)
    assert isinstance(membership_of("srv:_http._tcp.engines"), DnsMembership)


def test_messages_of_large_fleets_are_bounded() -> None:
    members = [Member(f"e{number}", f"http://127.0.0.1:{number + 1}") for number in range(100)]
    with Fleet(StaticMembership(members)) as fleet:
        result = fleet.release()
    assert len(result.failed) == 100
    assert "e7 failed while asking: no answer" in result.message
    assert "e8" not in result.message
    assert "and 92 more" in result.message


@pytest.mark.parametrize(
    "text",
    [
        "- http://user:secret@a:1",
        "- {name: a, url: 'http://user:secret@a:1'}",
        "- {name: a, url: 'http://user:secret@'}",
        "- {name: a, url: 'user:secret@a:1'}",
    ],
)
def test_credentials_in_an_address_are_refused_and_never_shown(tmp_path: Path, text: str) -> None:
    path = tmp_path / "members.yaml"
    path.write_text(text)
    with pytest.raises(
        MembershipError, match=r"has a user or a password; write the engine's key as api_key"
    ) as refused:
        members(StaticMembership(path))
    assert "secret" not in str(refused.value)
    assert "user:" not in str(refused.value)


def test_selectors() -> None:
    member = Member("a", "http://a:1", "qwen", {"role": "rollout"}, "host-1", ("GPU-1", "GPU-2"))
    every = Selector(names=("a",), models=("qwen",), labels={"role": "rollout"}, hosts=("host-1",), gpus=("GPU-2",))
    assert every.matches(member)
    assert Selector().matches(member)
    for field, other in {
        "names": ("b",),
        "models": ("x",),
        "labels": {"role": "x"},
        "hosts": ("x",),
        "gpus": ("x",),
    }.items():
        assert not every.model_copy(update={field: other}).matches(member)
    unknown = Member("a", "http://a:1", labels={"role": "rollout"}, host="host-1")
    assert not every.matches(unknown)
    assert every.may_match(unknown)
