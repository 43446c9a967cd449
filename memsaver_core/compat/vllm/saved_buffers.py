"""What a vLLM worker notes when it sleeps at level 2, and uses once, at a wake-up: named buffers of the model, and that
a draft model has to compute its own again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: Attributes of ``Worker``. A version may lack some of them.
_NOTES = ("_sleep_saved_buffers", "_sleep_rebuild_draft_metadata_buffers")


def notes(worker: Any) -> dict[str, Any]:
    """Return what the worker has noted and not used; to put it back, ``vars(worker).update(...)``."""
    return {name: note for name in _NOTES if (note := getattr(worker, name, None))}


@contextmanager
def set_aside(worker: Any) -> Iterator[None]:
    """Have the worker use nothing of it inside."""
    noted = notes(worker)
    vars(worker).update({name: type(note)() for name, note in noted.items()})
    try:
        yield
    finally:
        vars(worker).update(noted)
