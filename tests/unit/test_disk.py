"""Space for backups in files."""

from __future__ import annotations

import resource
from pathlib import Path

from memsaver_core.disk import is_in_memory


def test_a_folder_in_memory_is_known(tmp_path: Path) -> None:
    """Whatever its path, also with no descriptor left."""
    link = tmp_path / "a folder"
    link.symlink_to("/dev/shm")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        found = [is_in_memory(folder) for folder in ("/dev/shm", str(link), "/proc", "/nowhere")]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert found == [True, True, False, False]
