"""Restore policies: what a resume must restore of a tag."""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias

from memsaver_core.contract.errors import ConfigurationError


class RestorePolicy(str, Enum):
    """What a resume must restore of the content of a tag."""

    DISCARD = "discard"  # nothing: it is undefined
    ZERO = "zero"  # zeros
    HOST = "host"  # the content, kept in pinned host memory
    FILE = "file"  # the content, kept on disk


PolicyLike: TypeAlias = "RestorePolicy | str"

#: The tags that every client names. Other tags that a release of everything took are resumed with the last of these:
#: clients that name what they resume do not know an engine's workspace, and some do not know its graphs.
COMMON_TAGS = frozenset({"weights", "kv_cache"})

#: The tag of what NCCL's communicators hold. Not of regions: NCCL takes and keeps this memory itself.
COMMUNICATORS = "communicators"

#: The policy of a region that is given none; ``discard`` for other tags. A graph's memory holds state that is written
#: only at capture, so it is kept. KV pages with undefined content have given NaN, so they come back as zeros.
DEFAULT_POLICIES = {
    "weights": RestorePolicy.HOST,
    "kv_cache": RestorePolicy.ZERO,
    "cuda_graph": RestorePolicy.HOST,
    "workspace": RestorePolicy.ZERO,
    COMMUNICATORS: RestorePolicy.HOST,
}

#: Tags that every engine may have, so they are never unknown: a call for one without memory succeeds with 0 bytes.
WELL_KNOWN_TAGS = tuple(DEFAULT_POLICIES)

#: Tags whose memory comes back as zeros unless its content is kept.
ZEROED_TAGS = frozenset(tag for tag, policy in DEFAULT_POLICIES.items() if policy is RestorePolicy.ZERO)


def keeps_all(restore: str) -> bool:
    """Return whether all content of a tag with this policy survives a release; ``mixed`` does not keep all."""
    return restore in (RestorePolicy.HOST, RestorePolicy.FILE)


def keeps_any(restore: str) -> bool:
    """Return whether any content of a tag with this policy, which may be ``mixed``, survives a release."""
    return restore == "mixed" or keeps_all(restore)


def parse_policy(value: PolicyLike) -> RestorePolicy:
    """Return the policy that ``value`` names; raise ConfigurationError if there is none."""
    try:
        return RestorePolicy(value)
    except ValueError:
        names = ", ".join(policy.value for policy in RestorePolicy)
        raise ConfigurationError(f"unknown restore policy {value!r}; choose one of {names}") from None


def policy_for(tag: str, restore: PolicyLike | None) -> RestorePolicy:
    """Return ``restore`` if given, else the default of ``tag``, else ``DISCARD``; raise as ``parse_policy``."""
    if restore is not None:
        return parse_policy(restore)
    return DEFAULT_POLICIES.get(tag, RestorePolicy.DISCARD)
