"""The processes of an engine as one ``Memory``: what is released or resumed is so on all of them, or on none."""

from memsaver_core.contract.errors import GroupFailedError
from memsaver_server.ranks.group import Channel, Deadlines
from memsaver_server.ranks.memory import RankMemory

__all__ = ["Channel", "Deadlines", "GroupFailedError", "RankMemory"]
