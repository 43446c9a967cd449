"""A coordinator in a process of its own, to be killed: MEMBERS RECORD VERB LEASE_S OPTIONS. Prints its result."""

from __future__ import annotations

import json
import sys

from memsaver_server.fleet import FileRecord, Fleet, StaticMembership

members, record, verb, lease_s, options = sys.argv[1:]
with Fleet(StaticMembership(members), record=FileRecord(record), lease_s=float(lease_s)) as fleet:
    print(getattr(fleet, verb)(**json.loads(options)).model_dump_json())
