"""What both clients share: requests, retry rules and the parsing of answers and events, without any I/O."""

from __future__ import annotations

import json
import ssl
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError
from pydantic_core import SchemaError, from_json

from memsaver_core.contract.requests import OperationName
from memsaver_server.address import parse_address
from memsaver_server.api_key import parse_api_key
from memsaver_server.client.errors import AnswerError, InvalidRequestError, UnreachableError, error_for
from memsaver_server.client.keywords import ReleaseKeywords, ResizeKvCacheKeywords, ResumeKeywords
from memsaver_server.wrong_fields import wrong_fields

#: Delay before the second attempt, seconds; doubled before each further one.
FIRST_DELAY_S = 0.2

AnswerT = TypeVar("AnswerT", bound=BaseModel)


@dataclass(frozen=True)
class Call:
    """One request."""

    method: str
    path: str
    body: Mapping[str, Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    repeatable: bool = True  # it may be sent again if no answer came; else only if the connection failed
    long: bool = False  # it may take as long as an operation


class Target:
    """The service's address and the options of every request. ``uds``, a Unix socket's path, overrides ``url``."""

    def __init__(
        self, url: str, uds: str | None, api_key: str | None, timeout_s: float, operation_timeout_s: float | None
    ) -> None:
        """Raises ValueError if ``url`` is not an address, or the key contains characters that a header cannot carry."""
        self.address = f"unix://{uds}" if uds else parse_address(url)
        self.uds = self.address.removeprefix("unix://") if self.address.startswith("unix://") else None
        self.base_url = "http://localhost" if self.uds else self.address
        key = parse_api_key(api_key or "").encode()
        # As bytes: httpx accepts only ASCII in a str.
        self.headers = {b"User-Agent": b"memsaver-client", **({b"Authorization": b"Bearer " + key} if key else {})}
        self.timeout_s = timeout_s
        self.operation_timeout_s = operation_timeout_s

    def verifies(self, verify: ssl.SSLContext | bool) -> ssl.SSLContext | bool:
        """Return httpx's option ``verify``: False without HTTPS, since loading the authorities takes 20 ms."""
        return not self.address.startswith(("http://", "unix://")) and verify

    def options(self, call: Call) -> dict[str, Any]:
        timeout = httpx.Timeout(self.timeout_s, read=self.operation_timeout_s if call.long else self.timeout_s)
        return {"method": call.method, "url": call.path, "json": call.body, "headers": call.headers, "timeout": timeout}

    def unreachable(self, error: httpx.RequestError, attempts: int = 1) -> UnreachableError:
        return UnreachableError(self.address, str(error) or type(error).__name__, attempts)


_KEYWORDS = {"release": ReleaseKeywords, "resume": ResumeKeywords, "resize": ResizeKvCacheKeywords}


def operation_call(
    name: OperationName, tags: Iterable[str] | None, keywords: Mapping[str, object], *flags: str
) -> Call:
    """Return the call of an operation on ``tags`` (None: all); keywords that are None are left out, ``flags`` are true.
    Raises TypeError if a keyword argument does not exist, and as ``key_header``."""
    known = _KEYWORDS[name].__annotations__
    if unknown := sorted(keywords.keys() - known.keys()):
        raise TypeError(f"unknown keyword argument {unknown[0]!r}; {name} takes {', '.join(known)}")
    given = {key: value for key, value in keywords.items() if value is not None}
    headers = key_header(str(given.pop("key", uuid.uuid4().hex)))
    body: dict[str, Any] = {key: dict(value) if isinstance(value, Mapping) else value for key, value in given.items()}
    body |= dict.fromkeys(flags, True)
    if tags is not None:
        body["tags"] = [tags] if isinstance(tags, str) else list(tags)
    return Call("POST", path_of(name), body, headers, long=True)


def key_header(key: str) -> dict[str, str]:
    """Raises InvalidRequestError if a header cannot have the key."""
    if not (key.isascii() and key.isprintable()):
        raise InvalidRequestError(400, f"the key {key!r} has characters other than printable ASCII; nothing was sent")
    return {"Idempotency-Key": key}


def path_of(name: OperationName) -> str:
    return "/kv_cache" if name == "resize" else f"/{name}_memory_occupation"


def parse_json(response: httpx.Response) -> dict[str, Any]:
    """Return the JSON object of a success; raise AnswerError if the answer is not a success, or not a JSON object."""
    body, wrong = None, "it is not a JSON object"
    try:
        body = read_json(response.content)
    except ValueError as error:
        wrong = f"it is not valid JSON: {error}"
    if not response.is_success:
        text = response.content.decode(errors="replace")  # whatever encoding it names
        raise error_for(response.status_code, body, text, response.headers.get("Retry-After"))
    if not isinstance(body, dict):
        raise AnswerError(response.status_code, f"{response.url} gave an answer that cannot be read: {wrong}")
    return body


def read_json(content: bytes) -> Any:
    """Return the value of JSON that another process has sent. Raises ValueError if it is not JSON, or could not be sent
    on as JSON: nested deeper than 200 levels, with a number that is not finite, or text that UTF-8 cannot encode."""
    value = from_json(content, allow_inf_nan=False)
    json.dumps(value, allow_nan=False)  # 1e999 is infinite
    return value


def parse(model: type[AnswerT], response: httpx.Response) -> AnswerT:
    """Return a success as ``model``; raise AnswerError if the answer is not a success, or not a ``model``."""
    body = parse_json(response)
    try:
        return model.model_validate(body)
    except ValidationError as error:
        why = f"{response.url} did not answer as a memsaver service does: {wrong_fields(error)}"
        raise AnswerError(response.status_code, why) from error
    except SchemaError as error:  # a model is built at its first use, in which pydantic makes this of Ctrl-C
        if "KeyboardInterrupt" in str(error):
            raise KeyboardInterrupt from None
        raise


@dataclass(frozen=True)
class Event:
    """One event: its name and its JSON."""

    name: str
    data: Any


class EventParser:
    """Parses the lines of an operation's events, each of which has one line of data; ignores others (keep-alives)."""

    _name = ""

    def feed(self, line: str) -> Event | None:
        """Take one line without its line break; return the event that it completes, if any. Raises AnswerError if its
        data is not JSON."""
        field, _, value = line.partition(": ")
        if field == "event":
            self._name = value
        try:
            return Event(self._name, read_json(value.encode())) if field == "data" else None
        except ValueError as error:
            raise AnswerError(200, f"an event {self._name!r} cannot be read: it is not JSON: {error}") from error

    def end(self) -> None:
        """Raise httpx.ReadError if the last event was not that of the operation's end."""
        if self._name != "done":
            raise httpx.ReadError("the stream of events ended before the operation did, or has none")
