"""The base of the contract's models."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Model(BaseModel):
    """Frozen. Each class is built at its first use: a command imports all of them and uses few."""

    model_config = ConfigDict(frozen=True, defer_build=True)
