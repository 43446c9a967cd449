"""Restore policies: what resume owes a tag."""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias

from memsaver_core.errors import ConfigurationError


class RestorePolicy(str, Enum):
    """What resume owes to the content of a tag.

    ``DISCARD``: nothing, the content is undefined. ``ZERO``: zeros. ``HOST``: the content, kept in pinned host memory.
    ``FILE``: the content, kept on disk.
    """

    DISCARD = "discard"
    ZERO = "zero"
    HOST = "host"
    FILE = "file"


PolicyLike: TypeAlias = "RestorePolicy | str"

#: Tags that every engine may have. They are never unknown: with no memory under one, a call succeeds with 0 bytes.
WELL_KNOWN_TAGS = ("weights", "kv_cache", "cuda_graph", "workspace")

#: A graph's pool holds state that is written at capture and never rewritten, so it is kept; KV pages with undefined
#: content have given NaN, so they come back as zeros.
DEFAULT_POLICIES = {
    "weights": RestorePolicy.HOST,
    "cuda_graph": RestorePolicy.HOST,
    "kv_cache": RestorePolicy.ZERO,
    "workspace": RestorePolicy.ZERO,
}


_KEEPING = (RestorePolicy.HOST, RestorePolicy.FILE)


def keeps_all(restore: str) -> bool:
    """Whether all content of a tag with this policy survives a release; of a ``mixed`` one it does not."""
    return restore in _KEEPING


def keeps_any(restore: str) -> bool:
    """Whether some content of a tag with this policy, which may be ``mixed``, survives a release."""
    return restore == "mixed" or keeps_all(restore)


def parse_policy(value: PolicyLike) -> RestorePolicy:
    """Return the policy that ``value`` names.

    Raises:
        ConfigurationError: it names none.
    """
    try:
        return RestorePolicy(value)
    except ValueError:
        names = ", ".join(policy.value for policy in RestorePolicy)
        raise ConfigurationError(f"unknown restore policy {value!r}; choose one of {names}") from None


def policy_for(tag: str, restore: PolicyLike | None) -> RestorePolicy:
    """Return ``restore`` where it is given, else the default of ``tag``, else ``DISCARD``.

    Raises:
        ConfigurationError: ``restore`` is not a policy.
    """
    if restore is not None:
        return parse_policy(restore)
    return DEFAULT_POLICIES.get(tag, RestorePolicy.DISCARD)
