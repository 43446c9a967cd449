"""The JSON that tells what memory backups take. All sizes are bytes."""

from __future__ import annotations

from pydantic import BaseModel, Field


class SharedStoreAnswer(BaseModel, defer_build=True):
    """The store of host memory that several processes use (``MEMSAVER_SHARED_BACKUPS``)."""

    name: str
    processes: int = Field(description="that take part in it")
    held_bytes: int = Field(description="of blocks that this process uses")
    share_bytes: int = Field(description="the same, each block divided by the number of processes that use it")
    used_bytes: int = Field(description="of blocks that any process uses")
    total_bytes: int = Field(description="its memory")
    limit_bytes: int = Field(description="the bound on its memory, for all processes together")


class HostBackupAnswer(BaseModel, defer_build=True):
    bytes: int
    capacity_bytes: int
    limit_bytes: int
    file_bytes: int
    prepared: bool
    unused_bytes: int = Field(default=0, description="of capacity_bytes, kept for the next release")
    shared_store: SharedStoreAnswer | None = None
