"""How long a probe and a caller with the key wait while a crowd of connections asks without one.

Each connection of the crowd has a hundred requests waiting at all times, sent without waiting for answers; most of them
are refused for want of a key. Probes and the caller ask one request after the other, by a kept connection and by a new
one for each. Service, crowd and probes are processes of one machine and share its processors.

    python benchmarks/crowd.py
    python benchmarks/crowd.py --connections 300 --asked 400 --out /tmp
"""

from __future__ import annotations

import os
import platform
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
from _probing import Answer, Timeline, percentiles
from _record import new_parser, new_result, write

KEY = "k" * 32
#: Requests that wait on each connection of the crowd.
WAITING = 100
ASK = b"GET /memory_occupation HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
BESIDE = ("nobody", "the crowd")
SERVE = [sys.executable, "-m", "memsaver_server.cli", "serve", "--port", "0"]


def crowd(port: int, connections: int) -> None:
    """Ask until killed."""
    selector = selectors.DefaultSelector()

    def connect() -> None:
        each = socket.create_connection(("127.0.0.1", port))
        each.sendall(WAITING * ASK)
        each.setblocking(False)
        selector.register(each, selectors.EVENT_READ)

    for _ in range(connections):
        connect()
    print("all are there", flush=True)
    while True:
        for key, _ in selector.select():
            each = key.fileobj
            assert isinstance(each, socket.socket)
            try:
                answers = each.recv(1 << 16)
                each.send(answers.count(b"HTTP/1.1 ") * ASK)
            except BlockingIOError:
                continue
            except OSError:
                answers = b""
            if not answers:
                selector.unregister(each)
                each.close()
                connect()


def ask(url: str, count: int) -> Iterator[Answer]:
    """Ask for each path so often, by one connection and by a new one each time."""
    key = {"Authorization": f"Bearer {KEY}"}
    for path, headers in (("/livez", {}), ("/memory_occupation", key)):
        for new in (False, True):
            what = f"{path}, {'a new connection each' if new else 'one connection'}"
            client = httpx.Client(base_url=url, headers=headers, timeout=60)
            for _ in range(count):
                if new:
                    client.close()
                    client = httpx.Client(base_url=url, headers=headers, timeout=60)
                asked = time.time()
                client.get(path).raise_for_status()
                yield Answer(what, asked, time.time())
            client.close()


def to_markdown(result: dict[str, Any]) -> str:
    rows = [
        f"| {what} | {each['median']:.1f} | {each['p99']:.1f} | {each['max']:.1f} | {beside} |"
        for beside in BESIDE
        for what, each in result["ms"][beside].items()
    ]
    return "\n".join(
        [
            f"# Probes beside a crowd without a key: {result['processors']} processors, Python {result['python']}",
            "",
            f"{result['date']}, `{result['command']}`. {result['connections']} connections, {WAITING} requests waiting "
            f"on each; {result['asked']} answers of each kind, ms.",
            "",
            "| asked | median | 99th percentile | at most | beside |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--connections", type=int, default=300)
    parser.add_argument("--asked", type=int, default=400, help="answers of each kind")
    parser.add_argument("--crowd", type=int, help="PORT: be the crowd")
    options = parser.parse_args()
    if options.crowd:
        crowd(options.crowd, options.connections)
    result = new_result("crowd.py")
    result |= {"processors": len(os.sched_getaffinity(0)), "python": platform.python_version()}
    result |= {"connections": options.connections, "asked": options.asked}
    timeline, answers = Timeline(), list[Answer]()
    environment = {**os.environ, "MEMSAVER_API_KEY": KEY, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(SERVE, stdout=subprocess.PIPE, text=True, env=environment) as service:
        assert service.stdout is not None
        url = service.stdout.readline().split()[-1]
        with timeline.span(BESIDE[0]):
            answers += ask(url, options.asked)
        command = [
            sys.executable,
            __file__,
            "--crowd",
            url.rsplit(":", 1)[1],
            "--connections",
            str(options.connections),
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as others:
            assert others.stdout is not None
            assert others.stdout.readline(), "the crowd has ended"
            with timeline.span(BESIDE[1]):
                answers += ask(url, options.asked)
            assert others.poll() is None, "the crowd has ended"
            others.kill()
        service.terminate()
    result["ms"] = percentiles(answers, timeline)
    print(write("crowd", result, to_markdown, options.out))


if __name__ == "__main__":
    main()
