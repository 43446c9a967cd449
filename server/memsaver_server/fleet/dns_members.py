"""Members from DNS: the addresses of a name, for example of a headless Kubernetes service, or its SRV records."""

from __future__ import annotations

import asyncio
import logging
from ipaddress import ip_address
from typing import Any

import dns.asyncresolver
import dns.exception
import dns.resolver

from memsaver_server import clock
from memsaver_server.address import place
from memsaver_server.fleet.members import Member, MembershipError, checked

#: Bounds of the time for which an answer is used, whatever its TTL, seconds.
_SHORTEST_S, _LONGEST_S = 1.0, 30.0
#: Limit of one query, seconds.
_LIFETIME_S = 5.0

logger = logging.getLogger("memsaver")


class DnsMembership:
    """Members are called by their addresses with the port; with SRV records, by their targets with the port.

    A name without records has no members; a warning in the log says so. A headless Kubernetes service must have
    ``publishNotReadyAddresses: true``: else engines that are released, which are not ready, leave the fleet.

    Args:
        name: what to ask for. The search domains of the system apply.
        port: of every engine; None asks for SRV records, which name the ports.
    """

    def __init__(self, name: str, port: int | None) -> None:
        self._name = name
        self._port = port
        self._members: list[Member] = []
        self._expires = 0.0

    async def members(self) -> list[Member]:
        if clock.monotonic() >= self._expires:
            if self._port is not None:
                found, ttl_s = await self._addresses(self._name)
                members = [_member(place(address, self._port), address, self._port) for address in found]
            else:
                members, ttl_s = await self._services()
            if not members and (self._members or not self._expires):
                kind = "A or AAAA records" if self._port is not None else "SRV records with addresses"
                logger.warning("DNS has no %s of %s: the fleet has no members", kind, self._name)
            self._members = checked(members)
            self._expires = clock.monotonic() + min(max(ttl_s, _SHORTEST_S), _LONGEST_S)
        return list(self._members)

    async def changed(self) -> None:
        await asyncio.sleep(max(_SHORTEST_S, self._expires - clock.monotonic()))

    async def _services(self) -> tuple[list[Member], float]:
        records, ttl_s = await self._ask(self._name, "SRV")
        targets = sorted({(str(record.target).rstrip("."), int(record.port)) for record in records})
        answers = await asyncio.gather(*(self._addresses(target) for target, _ in targets))
        members = [
            _member(place(target, port), addresses[0], port)
            for (target, port), (addresses, _) in zip(targets, answers, strict=True)
            if addresses
        ]
        return members, min([ttl_s, *(ttl for _, ttl in answers)])

    async def _addresses(self, name: str) -> tuple[list[str], float]:
        """Return the addresses of a name, those of IPv4 first, and how long they count."""
        answers = await asyncio.gather(self._ask(name, "A"), self._ask(name, "AAAA"))
        found = [sorted(str(record.address) for record in records) for records, _ in answers]
        return [*found[0], *found[1]], min(ttl for _, ttl in answers)

    async def _ask(self, name: str, kind: str) -> tuple[list[Any], float]:
        try:
            answer = await dns.asyncresolver.resolve(name, kind, search=True, lifetime=_LIFETIME_S)
        except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
            return [], _LONGEST_S
        except (dns.exception.DNSException, OSError) as error:
            raise MembershipError(f"DNS does not return the {kind} records of {name}: {error}") from None
        return list(answer), float(answer.rrset.ttl) if answer.rrset is not None else 0.0


def _member(name: str, address: str, port: int) -> Member:
    return Member(name, f"http://{place(str(ip_address(address)), port)}", host=address)
