"""What must not change unless it is meant to: what every door answers, as files that are compared with each run.

``files/`` has the answers of an engine and of a fleet to each way of calling them (status, headers, body, events),
their OpenAPI descriptions and metrics, the messages to ranks, a fleet's record, what the clients and the coordinator
send, and what the command line prints. A change of any of them is a difference of a file. If it is meant, record it::

    python -m tests.recordings --record

and say in CHANGELOG.md what has changed, and why. ``python -m tests.recordings`` compares, and prints the differences.

The engines are the tests' own, on the host driver. Each group runs in its own process, where no other group's memory
is. Times, ids, ports, versions, process ids and figures of the machine are replaced by names (``normal.py``). Most
answers are shortened to what others do not say; one of each kind is recorded as a whole. ``then`` is the state of the
engine after a call. At a door where many requests are tried, those with the same outcome are listed together: a field
that the door drops is listed beside the request without fields.
"""
