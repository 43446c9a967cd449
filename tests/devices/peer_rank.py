"""One rank of a group with peer buffers, told line by line what to do; `group_of` starts all of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import memsaver_core as ms
from memsaver_core import shared_buffers
from memsaver_core.shared_buffers import PeerBuffers, PeerSockets
from tests.devices.sharing_peer import Memory
from tests.programs import Child


@contextmanager
def group_of(kind: str, ranks: int, nbytes: int) -> Iterator[list[Child]]:
    """Ranks with a buffer each, on a device each if the devices are GPUs."""
    with ExitStack() as children:
        group = [
            children.enter_context(
                Child("-m", "tests.devices.peer_rank", kind, str(rank), str(rank if kind == "cuda" else 0), str(nbytes))
            )
            for rank in range(ranks)
        ]
        paths = json.dumps([json.loads(child.read_line()) for child in group])
        for child in group:
            child.say(paths)
        yield group


def all_do(group: list[Child], *order: object) -> list[str]:
    """What each rank answers; they work side by side."""
    with ThreadPoolExecutor(len(group)) as pool:
        return list(pool.map(lambda child: child.ask(" ".join(map(str, order))), group))


def main() -> None:
    kind, rank, device, nbytes = sys.argv[1:]
    memory = Memory(kind, int(device))

    def gather(value: Any) -> list[Any]:
        print(json.dumps(value), flush=True)
        return list(json.loads(sys.stdin.readline()))

    buffers = PeerBuffers(int(nbytes), int(device), PeerSockets(int(rank), gather))
    orders = {
        "addresses": lambda: buffers.addresses,
        "write": lambda seed: memory.write(buffers.addresses[int(rank)], int(seed), int(nbytes)),
        "read": lambda: [memory.read(address, int(nbytes)) for address in buffers.addresses],
        "suspend": buffers.suspend,
        "resume": buffers.resume,
        "imported": shared_buffers.imported_bytes,
    }
    for line in sys.stdin:
        name, *arguments = line.split()
        try:
            print(json.dumps(orders[name](*arguments)), flush=True)  # type: ignore[operator]
        except ms.MemsaverError as error:
            print(json.dumps(f"raised {error}"), flush=True)


if __name__ == "__main__":
    main()
