"""The options of a release and of a resume: one frozen object each, from the request to the core."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from memsaver_core.policies import PolicyLike, RestorePolicy, parse_policy


def tags_of(tags: Iterable[str] | None) -> tuple[str, ...]:
    """Return ``tags`` without repeats, in order; None and an empty list both mean all tags and give ``()``."""
    return tuple(dict.fromkeys(tags or ()))


@dataclass(frozen=True)
class ReleaseOptions:
    """What to release, and how."""

    tags: tuple[str, ...] = ()  # the tags to release; empty means all
    restore: Mapping[str, RestorePolicy] = field(default_factory=dict)  # policies for this release alone, by tag
    trim: bool | None = None  # also give back what libraries cache for speed; None means only with ``hibernate``
    hibernate: bool = False  # at the end, also give back the CUDA context

    @classmethod
    def of(
        cls, tags: Iterable[str] | None, restore: Mapping[str, PolicyLike] | None, trim: bool | None, hibernate: bool
    ) -> ReleaseOptions:
        """Return options from the arguments of ``memsaver_core.release``.

        Raises:
            ConfigurationError: a policy is unknown.
        """
        policies = {tag: parse_policy(policy) for tag, policy in (restore or {}).items()}
        return cls(tags_of(tags), policies, trim, hibernate)


@dataclass(frozen=True)
class ResumeOptions:
    """What to resume."""

    tags: tuple[str, ...] = ()  # the tags to resume; empty means all that is released
