"""Settings of the core, from the environment (prefix ``MEMSAVER_``)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ByteSize, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails, PydanticCustomError
from pydantic_settings import BaseSettings, SettingsConfigDict

from memsaver_core.contract.errors import ConfigurationError

PREFIX = "MEMSAVER_"

#: What a setting must be, by the type of pydantic's error; the braces are filled from its context.
_MUST_BE = {
    "bool_parsing": "must be 1 or 0",
    "byte_size": "must be a size, for example 8GiB, 500MB or a number of bytes",
    "byte_size_unit": "must be a size, for example 8GiB, 500MB or a number of bytes",
    "finite_number": "must be a finite number",
    "float_parsing": "must be a number",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "string_pattern_mismatch": "must be a name of up to 64 letters, digits, '-', '_' and '.'",
    "value_error": "cannot be used: {error}",
}

_Size = Annotated[ByteSize, Field(lt=1 << 63)]


class EnvironmentSettings(BaseSettings):
    """Settings that are given by name or read from the variable ``MEMSAVER_`` plus the name in capitals."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", frozen=True, hide_input_in_errors=True)

    def __init__(self, **values: Any) -> None:
        """Take ``values``; read what is not among them from the environment. Raises ConfigurationError if one cannot be
        used; the message names it and what it must be, but shows no secret."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            wrong = [_in_words(one, values, type(self)) for one in error.errors()]
            raise ConfigurationError("; ".join(wrong)) from None

    @classmethod
    def variables(cls) -> list[str]:
        return [PREFIX + name.upper() for name in cls.model_fields]


def _in_words(error: ErrorDetails, given: Mapping[str, Any], model: type[BaseSettings]) -> str:
    """Return what is wrong with a setting. The value of a secret is left out."""
    must_be = _MUST_BE.get(error["type"], error["msg"]).format(**error.get("ctx", {}))
    if not error["loc"]:  # of several settings together; the message of their check names them
        return must_be.removeprefix("cannot be used: ")
    name = str(error["loc"][0])
    field = model.model_fields.get(name)
    is_secret = field is None or "Secret" in str(field.annotation)
    shown = "" if is_secret else f" is {str(error['input'])[:80]!r}, but"
    return f"{name if name in given else PREFIX + name.upper()}{shown} {must_be}"


class CoreSettings(EnvironmentSettings):
    """How the saver of this process is made. Sizes take units: ``4GiB``, ``500MB``, or plain bytes."""

    enabled: bool = Field(True, description="False makes every call of memsaver_core a no-op")
    driver: Literal["auto", "cuda", "host"] = Field("auto", description="auto: cuda if a device answers, else host")
    host_device: str = Field(
        "", description="names of host devices, separated by commas; processes that name the same one compete for it"
    )
    host_capacity: _Size = Field(ByteSize(0), description="memory of each host device; 0 means half of RAM")
    host_backup_limit: _Size = Field(
        ByteSize(0),
        description="bound on pinned memory for backups; 0 means 80 % of the RAM available at the start. What passes "
        "through to or from files, or from a shared store, may take up to 256 MiB for each device besides",
    )
    shared_backups: str = Field(
        "",
        pattern=r"^[A-Za-z0-9._-]{0,64}$",
        description="name of a store of host memory in which processes of this user keep equal content once; "
        "empty: every process keeps its own",
    )
    file_dir: str = Field(default_factory=tempfile.gettempdir, description="folder for backups of restore policy file")
    retention: Literal["keep", "trim", "free"] = Field(
        "keep", description="what becomes of backup memory after a resume; keep makes the next release fast"
    )
    verify: Literal["auto", "full", "sampled", "off"] = Field(
        "auto", description="how much restored content is digested and compared; auto: full on CUDA, sampled on host"
    )
    pack: Literal["auto", "off"] = Field(
        "auto",
        description="whether content is kept packed, losslessly; auto: content that a sample finds to save an "
        "eighth, except the first 64 MiB of each tag, or 192 MiB of a tag of 1.3 GiB or more",
    )
    prepare_backup: bool = Field(True, description="pin memory for the first release in the background after load")
    communicators: Literal["auto", "keep", "off"] = Field(
        "auto",
        description="whether NCCL communicators are suspended with a release of everything; auto: if NCCL can; keep: "
        "only if the release asks for it or hibernates; off: never",
    )
    kv_cache_piece: _Size = Field(
        ByteSize(0),
        description="size of the pieces of the KV cache of vLLM or SGLang, which a resize needs; 32MiB is recommended: "
        "each piece adds some 60 us to a release with its resume; 0: as large as possible, and no resize",
    )
    peer_access: bool = Field(False, description="let every visible device reach the memory")

    @field_validator("file_dir")
    @classmethod
    def _check_folder(cls, folder: str) -> str:
        """The default is not checked: perhaps no tag is kept in files."""
        if not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
            raise PydanticCustomError("folder", "must be a folder in which files can be made")
        return folder
