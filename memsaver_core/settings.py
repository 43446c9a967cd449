"""Settings of the core, from the environment (prefix ``MEMSAVER_``)."""

from __future__ import annotations

import tempfile
from typing import Literal

from pydantic import ByteSize, Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class CoreSettings(BaseSettings):
    """How the saver of this process is made. Sizes take units: ``4GiB``, ``500MB``, or plain bytes."""

    model_config = SettingsConfigDict(env_prefix="MEMSAVER_", extra="ignore", frozen=True)

    enabled: bool = Field(True, description="False makes every call of memsaver_core a no-op")
    driver: Literal["auto", "cuda", "host"] = Field("auto", description="auto: cuda if a device answers, else host")
    host_device: str = Field(
        "", description="names of host devices, separated by commas; processes that name the same one compete for it"
    )
    host_capacity: ByteSize = Field(ByteSize(0), description="memory of each host device; 0 means half of RAM")
    host_backup_limit: ByteSize = Field(
        ByteSize(0),
        description="bound on pinned memory for backups; 0 means 80 % of the RAM available at the start. What passes "
        "through to or from files may take up to 256 MiB for each device besides",
    )
    file_dir: str = Field(default_factory=tempfile.gettempdir, description="folder for backups of restore policy file")
    retention: Literal["keep", "trim", "free"] = Field(
        "keep", description="what becomes of backup memory after a resume; keep makes the next release fast"
    )
    verify: Literal["auto", "full", "sampled", "off"] = Field(
        "auto", description="how much restored content is digested and compared; auto: full on CUDA, sampled on host"
    )
    prepare_backup: bool = Field(True, description="pin memory for the first release in the background after load")
    communicators: Literal["auto", "off"] = Field(
        "auto", description="whether NCCL communicators are suspended with a release of all ranks; auto: if NCCL can"
    )
    peer_access: bool = Field(False, description="let every visible device reach the memory")
