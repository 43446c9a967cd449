"""The client's error and the exit code for each answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from pydantic import BaseModel
from pydantic_core import SchemaError

from memsaver_server.cli.connection import exit_code_for
from memsaver_server.cli.options import ExitCode
from memsaver_server.client import (
    AnswerError,
    Client,
    ClientError,
    ConflictError,
    DeviceMemoryError,
    DrainDeadlineError,
    HostMemoryError,
    InvalidRequestError,
    PhaseDeadlineError,
    UnauthorizedError,
    UnavailableError,
    UnreachableError,
)
from memsaver_server.client.errors import error_for
from memsaver_server.client.requests import parse


def body(kind: str, **details: object) -> dict[str, object]:
    return {"success": False, "message": f"what {kind} says", "error": {"type": kind, "message": "", **details}}


@pytest.mark.parametrize(
    ("status", "kind", "error", "code"),
    [
        (400, "unknown_tag", InvalidRequestError, ExitCode.INVALID),
        (401, "unauthorized", UnauthorizedError, ExitCode.UNAUTHORIZED),
        (409, "conflict", ConflictError, ExitCode.CONFLICT),
        (413, "body_too_large", InvalidRequestError, ExitCode.INVALID),
        (422, "idempotency_key_reused", InvalidRequestError, ExitCode.INVALID),
        (503, "out_of_device_memory", DeviceMemoryError, ExitCode.OUT_OF_MEMORY),
        (503, "admission_closed", UnavailableError, ExitCode.NOT_NOW),
        (503, "too_many_operations", UnavailableError, ExitCode.NOT_NOW),
        (507, "out_of_host_memory", HostMemoryError, ExitCode.OUT_OF_MEMORY),
        (504, "drain_timeout", DrainDeadlineError, ExitCode.DEADLINE),
        (504, "phase_timeout", PhaseDeadlineError, ExitCode.DEADLINE),
        (500, "driver_error", AnswerError, ExitCode.FAILED),
    ],
)
def test_each_failure_is_a_class_and_an_exit_code(
    status: int, kind: str, error: type[AnswerError], code: ExitCode
) -> None:
    raised = error_for(status, body(kind), "", None)
    assert type(raised) is error
    assert (raised.status, raised.kind, str(raised)) == (status, kind, f"what {kind} says")
    assert exit_code_for(raised) is code


def test_memory_figures_and_retry_after_are_there() -> None:
    raised = error_for(503, body("out_of_device_memory", needed_bytes=7, free_bytes=3), "", "2")
    assert isinstance(raised, DeviceMemoryError)
    assert (raised.needed_bytes, raised.free_bytes, raised.retry_after_s) == (7, 3, 2.0)


@pytest.mark.parametrize("answer", [None, [], "text", {"error": "a string"}, {"detail": "a proxy's page"}])
def test_an_answer_that_is_not_ours_is_an_error_all_the_same(answer: object) -> None:
    raised = error_for(502, answer, "<html>Bad Gateway</html>", "soon")
    assert type(raised) is AnswerError
    assert raised.kind == ""
    assert str(raised)


@pytest.mark.parametrize("call", [Client.occupation, Client.generate, lambda client: client.plan("release")])
@pytest.mark.parametrize(("content", "encoding"), [(b"5", ""), (b"[1]", ""), (b'"x"', ""), (b"no gzip", "gzip")])
def test_an_answer_that_cannot_be_read_is_a_client_error(
    call: Callable[[Client], object], content: bytes, encoding: str
) -> None:
    with answered(content, encoding) as client, pytest.raises(ClientError):
        call(client)


def test_ctrl_c_while_the_model_of_an_answer_is_built() -> None:
    class Interrupted(BaseModel):
        @classmethod
        def model_validate(cls, *_arguments: object, **_named: object) -> Any:
            raise SchemaError('Error building "model" validator:\n  KeyboardInterrupt: ')

    with pytest.raises(KeyboardInterrupt):
        parse(Interrupted, httpx.Response(200, json={}))


@pytest.mark.parametrize(
    ("content", "encoding", "why"),
    [
        (b'event: done\ndata: {"succ', "", "'done' cannot be read"),
        (b"event: done\ndata: {nope}\n\n", "", "'done' cannot be read"),
        (b'event: phase\ndata: {"name": "drain"}\n\n', "", "ended before the operation did"),
        (b"<html>Bad Gateway</html>", "", "ended before the operation did"),
        (b"no gzip", "gzip", "no answer"),
    ],
)
def test_events_that_do_not_end_with_the_operation_are_a_client_error(content: bytes, encoding: str, why: str) -> None:
    with answered(content, encoding) as client, pytest.raises(ClientError, match=why):
        list(client.events("some"))


def test_figures_that_are_no_numbers_are_none() -> None:
    raised = error_for(503, body("out_of_device_memory", needed_bytes="many", free_bytes=[], held_bytes="x"), "", None)
    assert (raised.needed_bytes, raised.free_bytes, raised.held_bytes) == (0, 0, None)


def answered(content: bytes, encoding: str) -> Client:
    """A client of a service that answers everything by this."""

    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"Content-Encoding": encoding}, content=iter([content]))

    return Client(transport=httpx.MockTransport(answer), attempts=1)


def test_no_answer_names_the_address() -> None:
    error = UnreachableError("unix:///run/memsaver.sock", "refused", 3)
    assert "unix:///run/memsaver.sock" in str(error)
    assert exit_code_for(error) is ExitCode.UNREACHABLE


@pytest.mark.parametrize("key", ["é", "a\nb"])
def test_a_key_that_no_header_can_have_is_refused_by_name(key: str) -> None:
    """It was a foreign exception, or a service that is not reached."""
    with Client() as client:
        for call in (lambda: client.release(key=key), lambda: client.commit("some", key=key)):
            with pytest.raises(InvalidRequestError, match="printable ASCII; nothing was sent"):
                call()


def test_an_argument_that_release_does_not_have_is_a_type_error() -> None:
    with Client() as client, pytest.raises(TypeError, match=r"'restor'.*at_least_bytes"):
        client.release(restor={"weights": "discard"})  # type: ignore[call-arg]
