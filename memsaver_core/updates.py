"""An update of weights while they are released, in steps that all processes of an engine take together. Of engines that
share a store, one loads an update from files; the others take what that one has written."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Literal

import torch

from memsaver_core import process
from memsaver_core.contract.errors import BackupError, MemsaverError
from memsaver_core.lending import Lending
from memsaver_core.manifests import WeightsKey
from memsaver_core.weights import WAIT_S, Loading, living

logger = logging.getLogger("memsaver")

Step = Literal["find", "lend", "fill", "keep", "commit", "drop"]

#: The tags whose lent memory has its new content from the shared store: a loader is to write nothing.
filled_tags: set[str] = set()
#: How often processes of one engine look together for what another engine loads, seconds.
POLL_S = 0.05
#: By tag, the entry of the shared store by which others find the last update.
_found_by: dict[str, int] = {}


def written_asleep(tag: str, source: WeightsKey | None = None) -> AbstractContextManager[None]:
    """Run the block, which writes tensors of ``tag`` while their memory is released. A resume brings back what was
    written; after an error, the content from before. ``source`` has model and revision of the files from which the
    block loads all weights: engines with the same share one load. Raises as ``Lending`` and its methods."""
    update = Update(tag, source=source)
    return in_steps(lambda step: [update.take(step)], shared=source is not None)


@contextmanager
def in_steps(take: Callable[[Step], Sequence[str]], shared: bool) -> Iterator[None]:
    """Run the block between the steps of an update. ``take`` has every process take a step, and returns the answers."""
    try:
        found = shared and _is_kept(take)
        take("lend")
        if found and any(take("fill")):
            take("drop")  # for the loader may write only a part of what is filled
            _is_kept(take)  # what is damaged is replaced
            take("lend")
        yield
        take("keep")
    except BaseException:
        take("drop")
        raise
    take("commit")


def _is_kept(take: Callable[[Step], Sequence[str]]) -> bool:
    """Return whether the store has the update for all processes, after any other engine that loads it is done. An
    engine waits for the first part that the store lacks, and then holds no part for which others wait."""
    until = time.monotonic() + WAIT_S
    while (lacking := next((each for each in take("find") if each != "kept"), None)) == "awaited":
        if time.monotonic() > until:
            break
        take("drop")
        time.sleep(POLL_S)
    return lacking is None


class Update:
    """The part of one process in an update of ``tag``."""

    def __init__(self, tag: str, processes: int = 1, source: WeightsKey | None = None) -> None:
        self._tag, self._processes, self._source = tag, processes, source
        self._lending: Lending | None = None
        self._loading: Loading | None = None
        self._entry: int | None = None  # of the store, found or claimed
        self._claimed = False
        self._others = b""

    def take(self, step: Step) -> str:
        """Take a step; after ``commit`` or ``drop``, begin anew. ``find`` returns what ``Loading.find`` does, empty if
        this process cannot share the update; ``fill`` why the content is not the store's. Raises as ``Lending``."""
        match step:
            case "find":
                return self._find()
            case "lend":
                self._lending = Lending(self._tag, self._processes)
                self._others = self._digest_of_others(self._lending)
            case "fill":
                return self._fill()
            case "keep" if self._lending is not None:
                self._check_others(self._lending)
                self._lending.keep()
            case "commit" | "drop":
                self._end(commit=step == "commit")
        return ""

    def _find(self) -> str:
        store, known = process.saver().shared_store, living(self._tag)
        if store is None or self._source is None:
            return ""
        try:
            if len(known) != 1:
                raise ValueError(f"{len(known)} calls of load_weights have filled the tensors that there are, not one")
            ((key, tensors),) = known
            key = replace(key, model=self._source.model, revision=self._source.revision)
            self._loading = Loading(store, key, lambda: tensors, self._tag)
        except ValueError as error:
            logger.warning("an update of %s is not shared: %s", self._tag, error)
            return ""
        found, entry = self._loading.find()
        if found == "awaited":
            store.wait_for_change()
        elif found != "no_room":
            self._entry, self._claimed = entry, found == "claimed"
        return found

    def _digest_of_others(self, lending: Lending) -> bytes:
        """Return a digest of the tensors that are not in the store: the model makes them itself."""
        digest = hashlib.blake2b()
        for number, storage in lending.storages.items():
            if self._claimed and self._loading is not None and not self._loading.has(number):
                digest.update(torch.empty(0, dtype=torch.uint8).set_(storage).numpy().data)
        return digest.digest()

    def _check_others(self, lending: Lending) -> None:
        """Have no engine find this update if it has written more than the tensors that they would find."""
        if self._digest_of_others(lending) != self._others:
            logger.warning("an update of %s is not shared: it writes tensors that are not in the store", self._tag)
            self._give(self._entry)
            self._entry, self._claimed = None, False

    def _fill(self) -> str:
        assert self._lending is not None
        assert self._loading is not None
        try:
            self._loading.copy_to(self._lending.storages)
        except (MemsaverError, ValueError) as error:
            if isinstance(error, (BackupError, ValueError)):
                self._loading.drop()
            logger.warning("the update of %s is loaded from its files: %s", self._tag, error)
            return str(error)
        filled_tags.add(self._tag)
        return ""

    def _end(self, commit: bool) -> None:
        filled, lending, loading, entry = self._tag in filled_tags, self._lending, self._loading, self._entry
        filled_tags.discard(self._tag)
        claimed, self._claimed = self._claimed, False
        self._lending = self._loading = self._entry = None
        with ExitStack() as at_end:
            at_end.callback(self._give, entry)
            if lending is not None:
                lending.end(commit)
            if not commit or loading is None or entry is None:
                return
            if filled:
                logger.info("the update of %s came from the shared store", self._tag)
            if claimed:
                try:
                    loading.publish(entry)
                except (MemsaverError, ValueError) as error:
                    logger.warning("the shared store does not have the update of %s: %s", self._tag, error)
                    return
            at_end.pop_all()
            self._give(_found_by.pop(self._tag, None))
            _found_by[self._tag] = entry

    def _give(self, entry: int | None) -> None:
        """Hold an entry of the store no longer."""
        if entry is not None and (store := process.saver().shared_store) is not None:
            store.give(entry)
