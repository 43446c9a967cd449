"""Settings of the service, each read from the environment variable ``MEMSAVER_`` plus its name in capitals."""

from __future__ import annotations

import logging
import os
import re
from difflib import get_close_matches
from functools import cache
from typing import Literal

from pydantic import ByteSize, Field, SecretStr, TypeAdapter, field_validator, model_validator

from memsaver_core.contract.requests import DEFAULT_SILENCE_S
from memsaver_core.settings import PREFIX, CoreSettings, EnvironmentSettings
from memsaver_server.address import is_ip_address
from memsaver_server.api_key import parse_api_key

logger = logging.getLogger("memsaver")

#: Variables that are not settings: those of the command line, the integrations and the preload library.
OTHER_VARIABLES = (
    *("MEMSAVER_URL", "MEMSAVER_ENGINE_API_KEY", "MEMSAVER_PRELOAD_INHERIT"),
    *("MEMSAVER_VLLM", "MEMSAVER_SGLANG", "MEMSAVER_SGLANG_REPLICAS", "MEMSAVER_TOKENSPEED"),
)

_SIZE = TypeAdapter(ByteSize)
#: A name at least this similar (difflib's ratio) to a known one counts as misspelt. MEMSAVER_SERVICE_HOST and the like,
#: which Kubernetes sets, are less similar.
_LIKENESS = 0.8


class Settings(EnvironmentSettings):
    """Settings of the service. All sizes are bytes, all times seconds."""

    api_key: SecretStr | None = Field(
        default=None,
        description="Required of every caller as 'Authorization: Bearer', and to bind any address but loopback.",
    )
    read_key: SecretStr | None = Field(
        default=None,
        description="A second key, for callers that may only read: status, operations, metrics and the dashboard.",
    )
    hosts: str = Field(
        default="",
        description="Host names, separated by commas and each written out, under which callers without a key may call, "
        "beside localhost and loopback addresses.",
    )
    audit_file: str = Field(
        default="", description="File that each operation's audit line is appended to; reopened after it was moved."
    )
    protect_probes: bool = Field(default=False, description="Require the key for health probes and metrics as well.")
    drain_timeout_s: float = Field(default=25.0, ge=0, le=86400, description="Default deadline of the drain.")
    phase_timeout_s: float = Field(
        default=60.0,
        gt=0,
        le=86400,
        description="Time without progress after which a phase counts as stalled and its callers get an error.",
    )
    silence_s: float = Field(
        default=DEFAULT_SILENCE_S,
        gt=0,
        le=3600,
        description="Of a fleet's coordinator: how long it waits for an engine that does not answer.",
    )
    while_released: Literal["refuse", "queue"] = Field(
        default="refuse", description="What happens to requests that arrive while memory is released."
    )
    queue_limit: int = Field(
        default=1024, ge=1, description="Maximum number of requests held while paused or released."
    )
    kv_cache: str = Field(
        default="",
        description="Bounds of the KV cache's size, such as 4GiB..40GiB: engines of the same GPUs "
        "that have this setting hand memory to each other, by need. Empty: only callers resize it.",
    )
    verify_tokens: bool = Field(
        default=False,
        description="Whether the tokens of a fixed prompt verify every release and resume, or only if a call asks.",
    )
    history: int = Field(default=256, ge=1, description="Number of finished operations that are remembered.")
    max_body_bytes: int = Field(default=16 << 20, ge=1024, description="Size limit of request bodies.")
    max_update_bytes: int = Field(
        default=4 << 30, ge=1024, description="Size limit of request bodies that carry weights."
    )

    @field_validator("api_key", "read_key")
    @classmethod
    def _validate_api_key(cls, key: SecretStr | None) -> SecretStr | None:
        """Treat an empty key as no key."""
        text = parse_api_key(key.get_secret_value()) if key is not None else ""
        return SecretStr(text) if text else None

    @field_validator("hosts")
    @classmethod
    def _validate_hosts(cls, hosts: str) -> str:
        """Refuse names that no request can match."""
        for name in filter(None, map(str.strip, hosts.split(","))):
            if not (re.fullmatch(r"[a-z0-9._-]+", name, re.IGNORECASE | re.ASCII) or is_ip_address(name)):
                raise ValueError(
                    f"{name!r} is not a host name. Write each name out, without scheme and port. There is no pattern "
                    "for all names: it would let the page of any site call this server. With MEMSAVER_API_KEY every "
                    "name is accepted"
                )
        return hosts

    @field_validator("kv_cache")
    @classmethod
    def _validate_kv_cache(cls, bounds: str) -> str:
        if bounds:
            cache_bounds(bounds)
        return bounds

    @model_validator(mode="after")
    def _validate_read_key(self) -> Settings:
        if self.read_key is not None and self.api_key in (None, self.read_key):
            need = "MEMSAVER_READ_KEY needs another key in MEMSAVER_API_KEY"
            raise ValueError(f"{need}, for the callers that may do more")
        return self


def cache_bounds(bounds: str) -> tuple[int, int]:
    """Return the sizes in ``4GiB..40GiB``, bytes; raise ValueError if these are no bounds."""
    low, _, high = bounds.partition("..")
    try:
        sizes = int(_SIZE.validate_python(low)), int(_SIZE.validate_python(high))
    except ValueError:
        sizes = (1, 0)
    if not 0 <= sizes[0] <= sizes[1]:
        raise ValueError(f"{bounds!r} is not a smaller and a larger size, such as 4GiB..40GiB")
    return sizes


def misspelt_variables() -> dict[str, str]:
    """Return the variables that nothing reads and whose names resemble a known one, each with the known name."""
    known = {*CoreSettings.variables(), *Settings.variables(), *OTHER_VARIABLES}
    stems = [name.removeprefix(PREFIX) for name in known]
    found = {}
    for name in sorted(os.environ):
        if name.upper().startswith(PREFIX) and name.upper() not in known:
            near = get_close_matches(name.upper().removeprefix(PREFIX), stems, 1, _LIKENESS)
            if near:
                found[name] = PREFIX + near[0]
    return found


@cache
def warn_of_misspelt_variables() -> None:
    """Log a warning for each misspelt variable, once in a process."""
    for name, near in misspelt_variables().items():
        logger.warning("%s has no effect: there is no setting of that name; %s is one", name, near)
