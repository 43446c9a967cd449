"""A rank beside rank 0 of a tensor-parallel engine, started as ``python -m`` this module with SOCKET and RANK."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch

import memsaver_core as ms
from memsaver_core.ranks.connection import serve
from memsaver_core.ranks.protocol import Plain
from memsaver_core.ranks.rank import Rank
from memsaver_server.reference import tensor_parallel
from memsaver_server.reference.options import EngineOptions
from memsaver_server.reference.requests import Row
from memsaver_server.reference.runner import ModelRunner
from memsaver_server.reference.sampling import Sampler, Sampling
from memsaver_server.reference.tensor_parallel import Place
from memsaver_server.reference.updates import WeightUpdate

#: Messages that are not answered.
_STEPS = ("prefill", "decode", "repair")


class RankProcess:
    """Does what rank 0 says, one message after another."""

    def __init__(self, rank: int) -> None:
        self._number = rank
        self._rank = Rank()
        self._runner: ModelRunner
        self._update: WeightUpdate
        self._sampler = Sampler(Sampling())

    def answer(self, message: Plain) -> Plain | None:
        """Carry out one message.

        The error of a read is part of the answer. Any other is raised, and ends this process: it would not be at the
        same step as the other ranks any more.
        """
        name = message.get("engine")
        if name is None:
            return self._rank.answer(message)
        fields = {key: value for key, value in message.items() if key != "engine"}
        try:
            with torch.no_grad():
                getattr(self, f"do_{name}")(**fields)
        except Exception as error:
            if not name.startswith("read_"):
                raise
            return {"error": str(error), "invalid": isinstance(error, ValueError)}
        return None if name in _STEPS else {}

    def do_setup(self, options: dict[str, Any], ranks: int, meeting: str) -> None:
        asked = EngineOptions(**options)
        place = Place(self._number, ranks)
        tensor_parallel.join(place, tensor_parallel.meet(Path(meeting), ranks), asked.device_of(place.rank))
        self._runner = asked.make_runner(place)
        self._update = WeightUpdate(self._runner, asked.torch_dtype)
        if ms.core_settings().prepare_backup:
            ms.prepare_backup()

    def do_prefill(self, slot: int, tokens: list[int], start: int) -> None:
        self._runner.prefill(slot, tokens, start, None)

    def do_decode(self, rows: list[tuple[int, int, int]]) -> None:
        self._runner.decode([Row(slot, position, token, self._sampler) for slot, position, token in rows])

    def do_repair(self, lost: list[str]) -> None:
        self._runner.repair(lost)

    def do_read_folder(self, folder: str) -> None:
        self._update.read_folder(Path(folder))

    def do_read_payload(self, payload: list[str], load_format: str | None) -> None:
        self._update.read_payload(payload, load_format)

    def do_write(self) -> None:
        self._update.write()


def main(path: str, rank: int) -> None:
    """Serve until rank 0 closes the connection; end at once with its process, also in the middle of a step."""
    for number in (signal.SIGINT, signal.SIGTERM):  # of a terminal or a service manager: rank 0 ends the others
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(os.getppid(),), name="memsaver-parent", daemon=True).start()
    serve(path, rank, RankProcess(rank).answer)
    os._exit(0)  # the driver takes everything back; torch would first wait for the other ranks


def _end_with(parent: int) -> None:
    """End this process when ``parent`` has ended."""
    try:
        ended = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(1)
    select.select([ended], [], [])
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
