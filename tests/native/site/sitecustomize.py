"""Loads a native module of the tests' own as ``memsaver_core._native``.

Python imports this at its start if the folder is on PYTHONPATH. Without TESTS_NATIVE_MODULE, or with an empty one, it
does nothing.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec

#: The environment variable with the module's path.
VARIABLE = "TESTS_NATIVE_MODULE"


class Finder:
    def __init__(self, path: str) -> None:
        self._path = path

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        return importlib.util.spec_from_file_location(name, self._path) if name == "memsaver_core._native" else None


def install(path: str) -> None:
    """Load ``path`` when ``memsaver_core._native`` is first imported."""
    assert "memsaver_core._native" not in sys.modules
    sys.meta_path.insert(0, Finder(path))


if __name__ == "sitecustomize" and os.environ.get(VARIABLE):
    install(os.environ[VARIABLE])
