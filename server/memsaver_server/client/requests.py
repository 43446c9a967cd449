"""What the sync and the async client share: requests, retry rules, parsing. Nothing here does input or output."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel

from memsaver_server.api_key import key_of
from memsaver_server.client.errors import AnswerError, error_for

DEFAULT_URL = "http://127.0.0.1:30000"

#: Seconds before the second attempt; each further one waits twice as long.
FIRST_PAUSE_S = 0.2

AnswerT = TypeVar("AnswerT", bound=BaseModel)


@dataclass(frozen=True)
class Call:
    """One request, and how it may be repeated.

    Attributes:
        repeatable: it may be sent again after the request went out and no answer came. Otherwise only a connection
            that was never made is tried again.
        long: it may take as long as an operation takes.
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
    """Where the service is and how to speak to it. ``uds`` is the path of a Unix socket and goes before ``url``."""

    url: str
    uds: str | None
    api_key: str | None = field(repr=False)
    timeout_s: float
    operation_timeout_s: float | None

    @classmethod
    def at(
        cls, url: str, uds: str | None, api_key: str | None, timeout_s: float, operation_timeout_s: float | None
    ) -> Target:
        """Return the target; a ``url`` of the form ``unix:///path`` is a Unix socket too.

        Raises:
            ValueError: the key holds what no header can.
        """
        if api_key is not None:
            api_key = key_of(api_key)
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
        # As bytes: a key may be any text, and httpx takes only ASCII for a str.
        key = {b"Authorization": b"Bearer " + self.api_key.encode()} if self.api_key else {}
        return {b"User-Agent": b"memsaver-client", **key}

    def timeout(self, call: Call) -> httpx.Timeout:
        return httpx.Timeout(self.timeout_s, read=self.operation_timeout_s if call.long else self.timeout_s)


RELEASE = "/release_memory_occupation"
RESUME = "/resume_memory_occupation"


def operation_call(path: str, tags: Iterable[str] | None, options: Mapping[str, Any]) -> Call:
    """Return the call of an operation on ``tags`` (None: all). Options that are None are left out."""
    body: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    if tags is not None:
        body["tags"] = [tags] if isinstance(tags, str) else list(tags)
    return Call("POST", path, body, {"Idempotency-Key": uuid.uuid4().hex}, long=True)


def release_options(
    timeout_s: float | None,
    mode: str | None,
    restore: Mapping[str, str] | None,
    at_least_bytes: int | None,
    trim: bool | None,
    hibernate: bool,
    wait: bool,
) -> dict[str, Any]:
    return {
        "timeout_s": timeout_s,
        "mode": mode,
        "restore": dict(restore) if restore else None,
        "at_least_bytes": at_least_bytes,
        "trim": trim,
        "hibernate": hibernate,
        "wait": wait,
    }


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
        AnswerError: the answer is no success, or no JSON.
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
        AnswerError: the answer is no success, or not what was expected.
    """
    body = parse_json(response)
    try:
        return model.model_validate(body)
    except ValueError as error:
        raise AnswerError(
            response.status_code, f"{response.url} answered in another form than a memsaver service does: {error}"
        ) from error
