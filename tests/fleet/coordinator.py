"""A coordinator in a process of its own, to be killed: MEMBERS RECORD VERB LEASE_S. Prints its result as JSON."""

from __future__ import annotations

import sys

from memsaver_server.fleet import FileRecord, Fleet, StaticMembership

members, record, verb, lease_s = sys.argv[1:]
with Fleet(StaticMembership(members), record=FileRecord(record), lease_s=float(lease_s)) as fleet:
    print(getattr(fleet, verb)().model_dump_json())
