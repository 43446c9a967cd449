"""Check the arrows between the rooms of csrc: an #include goes down, and never in a circle.

A header and the source file of its name are one node. What another include of a file brings, of the system or of a
lower room, is not included again.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
# From top to bottom. Rooms of one layer must not include each other.
LAYERS = (("python",), ("hooks", "hibernate"), ("vmm", "keeper"), ("backup",), ("driver",), ("support",))
RANK = {room: rank for rank, layer in enumerate(reversed(LAYERS)) for room in layer}
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"')

Graph = dict[str, set[str]]


def read(complaints: list[str]) -> Graph:
    """Return what each node includes; append what points up, sideways or out of csrc."""
    graph: Graph = {}
    for path in sorted([*CSRC.rglob("*.cpp"), *CSRC.rglob("*.hpp")]):
        name = path.relative_to(CSRC)
        room, node = name.parts[0], str(name.with_suffix(""))
        edges = graph.setdefault(node, set())
        if room not in RANK:
            complaints.append(f"csrc/{name}: the room {room} has no place in {Path(__file__).name}")
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found = INCLUDE.match(line)
            if not found:
                continue
            target = Path(found[1])
            other = target.parts[0]
            if not (CSRC / target).is_file():
                complaints.append(f'csrc/{name}:{number}: "{target}" is no path from csrc')
            elif other != room and RANK.get(other, -1) >= RANK[room]:
                complaints.append(f"csrc/{name}:{number}: {room} must not include {other}")
            elif str(target.with_suffix("")) != node:
                edges.add(str(target.with_suffix("")))
    return graph


def circle(graph: Graph) -> list[str]:
    """Return one circle of the graph, or nothing."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node not in done:
            for target in sorted(graph.get(node, ())):
                if found := visit(target, [*path, node]):
                    return found
            done.add(node)
        return []

    return next((found for node in sorted(graph) if (found := visit(node, []))), [])


def brought(name: str) -> set[str]:
    """Return what csrc/``name`` includes, itself or through what it includes; the system's in angle brackets."""
    own = included(name)
    return own.union(*(brought(each) for each in own if not each.startswith("<")))


@cache
def included(name: str) -> set[str]:
    return {
        each.strip('"') for each in re.findall(r'^#include ("[^"]+"|<.+>)', (CSRC / name).read_text(), re.MULTILINE)
    }


def repeated() -> list[str]:
    """Return complaints about includes of the system and of lower rooms that another include brings."""
    complaints = []
    for path in sorted([*CSRC.rglob("*.cpp"), *CSRC.rglob("*.hpp")]):
        name = str(path.relative_to(CSRC))
        own = included(name)
        others = set().union(*(brought(each) for each in own if not each.startswith("<")))
        room = RANK[path.relative_to(CSRC).parts[0]]
        for each in sorted(own & others):
            if each.startswith("<") or RANK[Path(each).parts[0]] < room:
                complaints.append(f"csrc/{name}: {each} is brought by another include")
    return complaints


def main() -> None:
    complaints: list[str] = []
    found = circle(read(complaints))
    if found:
        complaints.append("circle: " + " -> ".join(found))
    complaints = complaints or repeated()
    for line in complaints:
        print(line, file=sys.stderr)
    sys.exit(1 if complaints else 0)


if __name__ == "__main__":
    main()
