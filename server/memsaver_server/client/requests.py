"""What both clients share: requests, retry rules and parsing, without any I/O."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel

from memsaver_server.api_key import parse_api_key
from memsaver_server.client.errors import AnswerError, error_for
from memsaver_server.schemas import ReleaseArguments

DEFAULT_URL = "http://127.0.0.1:30000"

#: Delay before the second attempt, seconds; doubled before each further one.
FIRST_DELAY_S = 0.2

AnswerT = TypeVar("AnswerT", bound=BaseModel)


@dataclass(frozen=True)
class Call:
    """One request.

    Attributes:
        repeatable: it may be sent again if no answer came. Otherwise it is repeated only if the connection failed.
        long: it may take as long as an operation.
    """

    method: str
    path: str
    body: Mapping[str, Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    repeatable: bool = True
    long: bool = False

    def may_repeat(self, error: httpx.TransportError) -> bool:
        return self.repeatable or isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))


@dataclass(frozen=True)
class Target:
    """The service's address and the options of every request. ``uds``, a Unix socket's path, overrides ``url``."""

    url: str
    uds: str | None
    api_key: str | None = field(repr=False)
    timeout_s: float
    operation_timeout_s: float | None

    @classmethod
    def at(
        cls, url: str, uds: str | None, api_key: str | None, timeout_s: float, operation_timeout_s: float | None
    ) -> Target:
        """Return the target; ``url`` may be ``unix:///path``.

        Raises:
            ValueError: the key contains characters that a header cannot carry.
        """
        if api_key is not None:
            api_key = parse_api_key(api_key)
        if uds is None and url.startswith("unix://"):
            uds = url.removeprefix("unix://")
        return cls(url.rstrip("/"), uds, api_key, timeout_s, operation_timeout_s)

    @property
    def address(self) -> str:
        return f"unix://{self.uds}" if self.uds else self.url

    @property
    def base_url(self) -> str:
        return "http://localhost" if self.uds else self.url

    @property
    def headers(self) -> dict[bytes, bytes]:
        # As bytes: httpx accepts only ASCII in a str.
        key = {b"Authorization": b"Bearer " + self.api_key.encode()} if self.api_key else {}
        return {b"User-Agent": b"memsaver-client", **key}

    def timeout(self, call: Call) -> httpx.Timeout:
        return httpx.Timeout(self.timeout_s, read=self.operation_timeout_s if call.long else self.timeout_s)


RELEASE = "/release_memory_occupation"
RESUME = "/resume_memory_occupation"


def operation_call(
    path: str, tags: Iterable[str] | None, options: Mapping[str, object], *, run_async: bool = False
) -> Call:
    """Return the call of an operation on ``tags`` (None: all), without options that are None."""
    body: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    if run_async:
        body["async"] = True
    if tags is not None:
        body["tags"] = [tags] if isinstance(tags, str) else list(tags)
    return Call("POST", path, body, {"Idempotency-Key": uuid.uuid4().hex}, long=True)


def release_call(tags: Iterable[str] | None, arguments: ReleaseArguments, *, run_async: bool = False) -> Call:
    """Return the call of a release.

    Raises:
        TypeError: a keyword argument does not exist.
    """
    unknown = sorted(arguments.keys() - ReleaseArguments.__annotations__.keys())
    if unknown:
        raise TypeError(
            f"unknown keyword argument {unknown[0]!r}; release takes {', '.join(ReleaseArguments.__annotations__)}"
        )
    restore = dict(arguments.get("restore") or {}) or None
    return operation_call(RELEASE, tags, {**arguments, "restore": restore}, run_async=run_async)


def resume_call(
    tags: Iterable[str] | None, wait_for_memory_s: float | None, wait: bool, *, run_async: bool = False
) -> Call:
    """Return the call of a resume."""
    return operation_call(RESUME, tags, {"wait_for_memory_s": wait_for_memory_s, "wait": wait}, run_async=run_async)


def generate_call(text: str | None, input_ids: Sequence[int] | None, sampling_params: Mapping[str, Any]) -> Call:
    body: dict[str, Any] = {"sampling_params": dict(sampling_params)}
    if input_ids is not None:
        body["input_ids"] = list(input_ids)
    else:
        body["text"] = text or ""
    return Call("POST", "/generate", body, repeatable=False, long=True)


def parse_json(response: httpx.Response) -> Any:
    """Return the JSON of a success.

    Raises:
        AnswerError: the answer is not a success, or not JSON.
    """
    try:
        body = response.json()
    except ValueError:
        body = None
    if not response.is_success:
        raise error_for(response.status_code, body, response.text, response.headers.get("Retry-After"))
    if body is None:
        raise AnswerError(response.status_code, f"{response.url} answered with something that is not JSON")
    return body


def parse(model: type[AnswerT], response: httpx.Response) -> AnswerT:
    """Return a success as ``model``.

    Raises:
        AnswerError: the answer is not a success, or not a ``model``.
    """
    body = parse_json(response)
    try:
        return model.model_validate(body)
    except ValueError as error:
        raise AnswerError(
            response.status_code, f"{response.url} did not answer as a memsaver service does: {error}"
        ) from error
