"""Fields of a request that the service does not have: passed over, or refused as misspelt."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable

from memsaver_core.contract.errors import BadRequestError
from memsaver_core.contract.requests import FleetRelease, FleetResume, Selector

#: What known clients send beside our fields; it has no effect.
PASSED_OVER = frozenset(
    (
        *("reset_connector", "rid", "http_worker_ipc", "timeout"),  # verl; SGLang's base of all requests; its flush
        # SGLang's weight updates and pauses, as slime, miles and AReaL send them
        *("weight_version", "model_version", "is_async", "torch_empty_cache", "keep_pause", "recapture_cuda_graph"),
        *("token_step", "disable_draft_model", "target_modules", "manifest", "load_format", "clear_cache"),
        *("model", "model_name", "options", "operation_id"),  # Ray Serve, AIBrix
    )
)
#: Every field of a request of the contract: an endpoint that does not act on it refuses it.
_FIELDS = frozenset(
    field.alias or name
    for model in (FleetRelease, FleetResume)
    for name, field in model.model_fields.items()
    if name not in PASSED_OVER
) | {"commit"}
#: Least similarity of a misspelt name, by difflib: one wrong letter in four.
SIMILARITY = 0.75
#: More unknown fields than this are refused; comparing them would take long.
MAX_UNKNOWN = 64


def check_names(given: Iterable[str], known: Collection[str]) -> list[str]:
    """Return the names of ``given`` that are to be named in the answer as ignored. Raises BadRequestError if a name is
    close to a known one, has no effect here, or there are too many unknown ones."""
    unknown = [name for name in given if name not in known]
    if len(unknown) > MAX_UNKNOWN:
        raise BadRequestError(f"the request has {len(unknown)} unknown fields; send at most {MAX_UNKNOWN}")
    plain = {_plain(name): name for name in known}
    ignored = []
    for name in unknown:
        meant = _MEANT.get(_plain(name), "")
        near = plain.get(_plain(name)) or (meant if meant.partition(".")[0] in known else None)
        if near is None and name in _FIELDS:
            raise BadRequestError(f"field {name!r} has no effect here, so the request is refused. Nothing was done")
        short = len(name) <= 2 * max(map(len, known), default=0)  # comparing takes len(name) squared
        if near is None and short and name not in PASSED_OVER:
            near = next(iter(difflib.get_close_matches(name.lower(), known, 1, SIMILARITY)), None)
        if near is not None:
            raise BadRequestError(f"unknown field {name!r}; did you mean {near!r}? Nothing was done")
        ignored.append(name)
    return ignored


def _plain(name: str) -> str:
    """Return ``name`` without what is easily mistaken: case, separators and the plural."""
    return re.sub(r"[^a-z0-9]", "", name.lower()).rstrip("s")


#: What callers may write, as ``_plain`` returns it, for the fields by which we select engines.
_MEANT = {"modelname": "model", **{_plain(name): f"selector.{name}" for name in Selector.model_fields}}
_MEANT |= {"weightversion": "weights_version", "weightsversion": "weight_version"}  # the latter is SGLang's
