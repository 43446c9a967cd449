"""The manifests of the weights that a shared store has; each is a text of the store (csrc/backup/shared_store.hpp).

A manifest is found by its name, a digest of what the weights are. It says in which blocks of the store each allocation
lies, and in which allocation each storage. Needs no torch.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from memsaver_core import _native
from memsaver_core._native import SharedStore as SharedStore

_FORMAT = b"memsaver-weights-1"
#: Suffixes of the files with weights in a checkpoint's folder; other files, as a tokenizer's, may come later.
_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})


@dataclass(frozen=True)
class WeightsKey:
    """What weights are: engines with equal keys would load the same content into tensors of the same layout."""

    model: str
    #: Of the checkpoint's files; see ``revision_of``.
    revision: str
    dtype: str = ""
    quantization: str = ""
    rank: int = 0
    ranks: int = 1
    #: The program that gives the tensors their meaning, with its version.
    program: str = ""

    def name(self, layout: Any) -> str:
        """Return the name of a manifest of tensors of this layout, 32 hexadecimal digits."""
        return hashlib.sha256(json.dumps([asdict(self), layout]).encode()).hexdigest()[:32]


def revision_of(path: str | Path) -> str:
    """Return a digest of the names, sizes and times of the files with weights in a checkpoint's folder, or of one file;
    it changes with any of them. Raise OSError if ``path`` does not exist or cannot be read."""
    root = Path(path)
    files = [each for each in sorted(root.iterdir()) if each.suffix in _WEIGHTS] if root.is_dir() else [root]
    facts = [(each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in files]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def source_of(path: str | Path, version: str | None) -> WeightsKey | None:
    """Return what engines that update from the same files to the same version have in common: a key's model and
    revision. None if the version has no name, or the files are not found."""
    if version is None:
        return None
    try:
        return WeightsKey(str(Path(path).absolute()), f"{revision_of(path)}, version {version}")
    except OSError:
        return None


class Allocation(NamedTuple):
    """Memory in which storages lie, as the blocks that the store keeps of it."""

    nbytes: int
    blocks: Sequence[_native.SavedBlock]


@dataclass(frozen=True)
class Manifest:
    key: WeightsKey
    #: Of each storage, in the order of the layout: the allocation, and offset and bytes in it.
    storages: Sequence[tuple[int, int, int]]
    allocations: Sequence[Allocation]
    made_at: float = 0.0

    def to_text(self) -> bytes:
        lines, allocations = [], []
        for nbytes, blocks in self.allocations:
            allocations.append([nbytes, [block[:3] for block in blocks]])
            for _, _, extents, (lane0, lane1, any_bit) in blocks:
                content = sum(length for _, length in extents) if any_bit else 0  # the store keeps no zeros
                lines.append(f"{lane0:x} {lane1:x} {content:x}\n")
        about = {"key": asdict(self.key), "storages": self.storages, "allocations": allocations, "made_at": time.time()}
        rest = "".join(lines).encode() + json.dumps(about).encode()
        return b"%s %s %x\n" % (_FORMAT, hashlib.sha256(rest).hexdigest().encode(), len(lines)) + rest

    @classmethod
    def of_text(cls, text: bytes) -> Manifest:
        """Return what ``to_text`` wrote; raise ValueError if it is something else."""
        head, _, rest = text.partition(b"\n")
        words = head.split()
        if words[:2] != [_FORMAT, hashlib.sha256(rest).hexdigest().encode()]:
            raise ValueError("its manifest is damaged, or of another version of memsaver")
        *lines, last = rest.decode().split("\n")
        about = json.loads(last)
        digests = iter([[int(word, 16) for word in line.split()] for line in lines])
        allocations = [
            Allocation(nbytes, [(*block, tuple(next(digests))) for block in blocks])
            for nbytes, blocks in about["allocations"]
        ]
        return cls(WeightsKey(**about["key"]), about["storages"], allocations, about["made_at"])


class Kept(NamedTuple):
    """Weights that a store has: the store's account of their text, and their manifest, None if it cannot be read."""

    text: dict[str, Any]
    manifest: Manifest | None

    def description(self) -> dict[str, Any]:
        """Return this for people and programs to read."""
        text, manifest = self
        return asdict(manifest.key if manifest else WeightsKey("?", "?")) | {
            "id": text["name"],
            "age_s": round(time.time() - manifest.made_at, 3) if manifest else 0.0,
            "unused_s": text["unused_ms"] / 1000,
            "held_by": [{"process": process, "keeper": keeper} for process, keeper in text["holders"]],
            **{name: text[name] for name in ("bytes", "pinned", "complete")},
        }


def kept_in(store: SharedStore) -> list[Kept]:
    """Return the weights that can be found in a store now, those used last first."""

    def manifest(text: bytes) -> Manifest | None:
        try:
            return Manifest.of_text(text)
        except ValueError:
            return None

    texts = sorted(store.texts(), key=lambda each: int(each["unused_ms"]))
    return [Kept(each, manifest(each["text"])) for each in texts]


def keeper_command(name: str, limit_bytes: int, store_limit_bytes: int) -> list[str]:
    """Return the command of a process that keeps weights of a store, at most ``limit_bytes``. If it is the first
    process of the store, ``store_limit_bytes`` limits the store; 0 means 80 % of the memory that is available now."""
    program = Path(_native.__file__).with_name("memsaver-keeper")
    store_limit_bytes = store_limit_bytes or _native.available_memory_bytes() // 5 * 4
    return [str(program), name, str(limit_bytes), str(store_limit_bytes)]
