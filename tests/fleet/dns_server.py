"""A DNS server on a real socket, with records that tests change."""

from __future__ import annotations

from typing import Any

import dns.asyncresolver
from dnslib import QTYPE, RCODE, RR
from dnslib.server import BaseResolver, DNSLogger, DNSServer


class Zone(BaseResolver):
    """``records`` in the notation of zone files. ``broken``: every question is answered by a failure."""

    def __init__(self) -> None:
        self.records = ""
        self.broken = False
        self._server = DNSServer(self, port=0, address="127.0.0.1", logger=DNSLogger("-request,-reply"))
        self._server.start_thread()

    def resolver(self) -> dns.asyncresolver.Resolver:
        resolver = dns.asyncresolver.Resolver(configure=False)
        resolver.nameservers, resolver.port = ["127.0.0.1"], self._server.server.server_address[1]
        return resolver

    def resolve(self, request: Any, handler: Any) -> Any:
        reply = request.reply()
        if self.broken:
            reply.header.rcode = RCODE.SERVFAIL
            return reply
        zone = RR.fromZone(self.records)
        here = [record for record in zone if record.rname == request.q.qname]
        reply.add_answer(*(record for record in here if QTYPE[record.rtype] == QTYPE[request.q.qtype]))
        if not here:
            reply.header.rcode = RCODE.NXDOMAIN
        return reply

    def close(self) -> None:
        self._server.stop()
        self._server.server.server_close()
