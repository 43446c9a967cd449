"""Kinds of device: the only modules that know which kind is in use."""

from memsaver_core.backends.base import Backend

__all__ = ["Backend"]
