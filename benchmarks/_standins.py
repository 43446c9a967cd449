"""Stands in for engines that take a known time and next to no processor, so that what a fleet's operation takes beyond
its slowest engine is the coordinator's. They repeat what a real engine has answered.

    python benchmarks/_standins.py COUNT SECONDS        # prints their addresses as a line of JSON; ends with its input
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

os.environ.setdefault("MEMSAVER_DRIVER", "host")

import httpx

Answers = dict[tuple[str, str], bytes]


def recorded() -> Answers:
    """Return what a light engine answers in either state: when asked, when it prepares and when it commits."""
    from memsaver_server import attach
    from tests.fleet.light_engine import LightEngine

    found: Answers = {}
    with attach(LightEngine("recorded")) as attachment, httpx.Client(base_url=attachment.url) as http:
        for state, verb in (("resident", "release"), ("released", "resume")):
            path = f"/{verb}_memory_occupation"
            found[state, "GET /memory_occupation"] = http.get("/memory_occupation").raise_for_status().content
            prepared = http.post(path, json={"prepare": True}).raise_for_status()
            found[state, f"POST {path}"] = prepared.content
            commit = f"/operations/{prepared.json()['operation_id']}/commit"
            found[state, "commit"] = http.post(commit).raise_for_status().content
    return found


class StandIn:
    """One engine: a connection for each of its clients."""

    def __init__(self, answers: Answers, number: int, seconds: float) -> None:
        uuid = json.loads(answers["resident", "GET /memory_occupation"])["devices"][0]["uuid"].encode()
        own = {key: body.replace(uuid, b"gpu-%d" % number) for key, body in answers.items()}
        self._answers = {
            key: b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (len(body), body)
            for key, body in own.items()
        }
        self._seconds = seconds
        self._state = "resident"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await _head(reader):
            what = head.split(b" HTTP")[0].decode()
            length = next((int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"length:" in line), 0)
            await reader.readexactly(length)
            if what.endswith("/commit"):
                what = "commit"
                await asyncio.sleep(self._seconds)
            writer.write(self._answers[self._state, what])
            if what == "commit":
                self._state = "released" if self._state == "resident" else "resident"


def _message(body: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def _head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""


async def main(count: int, seconds: float) -> None:
    answers = await asyncio.to_thread(recorded)
    engines = [StandIn(answers, number, seconds) for number in range(count)]
    servers = [await asyncio.start_server(engine.serve, "127.0.0.1", 0) for engine in engines]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    print(json.dumps([f"http://127.0.0.1:{port}" for port in ports]), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))
