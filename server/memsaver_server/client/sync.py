"""The sync client. Generated from aio.py by .ci/generate_sync_client.py; do not edit."""

from __future__ import annotations

import ssl
import time
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from os import PathLike, fspath
from typing import Any, Literal, overload

import httpx
from typing_extensions import Unpack

from memsaver_server.client.errors import UnreachableError
from memsaver_server.client.requests import (
    DEFAULT_URL,
    FIRST_DELAY_S,
    Call,
    Event,
    EventParser,
    Target,
    generate_call,
    parse,
    parse_json,
    release_call,
    resume_call,
)
from memsaver_server.schemas import (
    AcceptedAnswer,
    MessageAnswer,
    OccupationAnswer,
    OperationAnswer,
    OperationsAnswer,
    OperationStatusAnswer,
    ReleaseArguments,
)
from memsaver_server.two_phases import PreparedAnswer


class Client:
    """Client of one service. Use it in one event loop.

    Args:
        url: the service's address, ``http://host:port``, ``https://host:port`` or ``unix:///path``. Ignored if ``uds``
            is given.
        uds: path of the service's Unix socket.
        api_key: sent as ``Authorization: Bearer``.
        timeout_s: limit of connecting, and of one attempt of a call that answers at once, in seconds.
        operation_timeout_s: limit of one attempt of a release, a resume or a generation. None: no limit.
        attempts: how often a call is sent in total, if repeating it is safe.
        verify: checks the certificate of an ``https`` address; False accepts any. The default trusts the system's
            authorities, or those of the file that SSL_CERT_FILE names.
        transport: another httpx transport, e.g. to reach an ASGI app.

    Every method raises UnreachableError if no answer came, and an AnswerError if the answer is not a success.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        uds: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 10.0,
        operation_timeout_s: float | None = 600.0,
        attempts: int = 3,
        verify: ssl.SSLContext | bool = True,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._target = Target(url, uds, api_key, timeout_s, operation_timeout_s)
        self._attempts = attempts
        self._http = httpx.Client(
            base_url=self._target.base_url,
            headers=self._target.headers,
            transport=transport or httpx.HTTPTransport(uds=self._target.uds, verify=self._target.verifies(verify)),
        )

    @property
    def address(self) -> str:
        """The service's address, for messages."""
        return self._target.address

    @overload
    def release(
        self,
        tags: Iterable[str] | None = None,
        *,
        prepare: Literal[False] = False,
        **options: Unpack[ReleaseArguments],
    ) -> OperationAnswer: ...

    @overload
    def release(
        self,
        tags: Iterable[str] | None = None,
        *,
        prepare: Literal[True],
        lease_s: float | None = None,
        **options: Unpack[ReleaseArguments],
    ) -> PreparedAnswer: ...

    def release(
        self,
        tags: Iterable[str] | None = None,
        *,
        prepare: bool = False,
        lease_s: float | None = None,
        **options: Unpack[ReleaseArguments],
    ) -> OperationAnswer | PreparedAnswer:
        """Release the device memory of ``tags`` (None: of all) to the driver.

        Args:
            prepare: do everything but that: close admission, drain, check; then wait for ``commit`` or ``abort``.
            lease_s: with ``prepare``: undo it after this many seconds without a commit.
            options: ``timeout_s``, ``mode``, ``restore``, ``at_least_bytes``, ``hibernate`` and the others of
                ``schemas.ReleaseFields``. ``wait`` waits for a conflicting operation instead of raising ConflictError.

        Raises:
            InvalidRequestError: a tag is unknown; the message lists those that exist.
            DrainDeadlineError: requests were still in flight at the deadline.
            HostMemoryError: host memory for the backup is short.
        """
        response = self._send(release_call(tags, options, prepare=prepare, lease_s=lease_s))
        return parse(PreparedAnswer, response) if prepare else parse(OperationAnswer, response)

    def start_release(self, tags: Iterable[str] | None = None, **options: Unpack[ReleaseArguments]) -> AcceptedAnswer:
        """As ``release``, but return once it has started; ``operation`` and ``events`` show its progress."""
        return parse(AcceptedAnswer, self._send(release_call(tags, options, run_async=True)))

    @overload
    def resume(
        self,
        tags: Iterable[str] | None = None,
        *,
        prepare: Literal[False] = False,
        wait_for_memory_s: float | None = None,
        wait: bool = False,
        verify: str | None = None,
    ) -> OperationAnswer: ...

    @overload
    def resume(
        self,
        tags: Iterable[str] | None = None,
        *,
        prepare: Literal[True],
        lease_s: float | None = None,
        wait_for_memory_s: float | None = None,
        wait: bool = False,
        verify: str | None = None,
    ) -> PreparedAnswer: ...

    def resume(
        self,
        tags: Iterable[str] | None = None,
        *,
        prepare: bool = False,
        lease_s: float | None = None,
        wait_for_memory_s: float | None = None,
        wait: bool = False,
        verify: str | None = None,
    ) -> OperationAnswer | PreparedAnswer:
        """Bring back the device memory of ``tags`` (None: of all that are released), at the same addresses.

        Args:
            prepare: only take the device memory, and wait for ``commit`` or ``abort``.
            lease_s: as of ``release``.
            wait_for_memory_s: how long to retry while other processes hold the device's memory, seconds.
            wait: wait for a conflicting operation instead of raising ConflictError.
            verify: ``"token"``: fail if a fixed prompt gives other tokens than before the release.

        Raises:
            InvalidRequestError: a tag is unknown; the message lists those that exist.
            DeviceMemoryError: the device has too little free memory. All is still released; call again later.
        """
        call = resume_call(tags, wait_for_memory_s, wait, verify, prepare=prepare, lease_s=lease_s)
        response = self._send(call)
        return parse(PreparedAnswer, response) if prepare else parse(OperationAnswer, response)

    def start_resume(
        self,
        tags: Iterable[str] | None = None,
        *,
        wait_for_memory_s: float | None = None,
        wait: bool = False,
        verify: str | None = None,
    ) -> AcceptedAnswer:
        """As ``resume``, but return once it has started; ``operation`` and ``events`` show its progress."""
        return parse(AcceptedAnswer, self._send(resume_call(tags, wait_for_memory_s, wait, verify, run_async=True)))

    def commit(self, operation_id: str) -> OperationAnswer:
        """Do what was prepared; return as ``release`` and ``resume`` do. Idempotent.

        Raises:
            ConflictError: its lease has ended, or it was aborted; all is as before it was prepared.
            Also as ``release`` and ``resume``.
        """
        return parse(OperationAnswer, self._send(Call("POST", f"/operations/{operation_id}/commit", long=True)))

    def abort(self, operation_id: str) -> OperationStatusAnswer:
        """Undo the preparation of an operation; return its status once it has ended. Idempotent.

        Raises:
            ConflictError: it was committed.
        """
        call = Call("POST", f"/operations/{operation_id}/abort", long=True)
        return parse(OperationStatusAnswer, self._send(call))

    def occupation(self) -> OccupationAnswer:
        """Return what the engine holds on its devices now."""
        return parse(OccupationAnswer, self._send(Call("GET", "/memory_occupation")))

    def operations(self) -> list[OperationStatusAnswer]:
        """Return the operations that the service remembers, newest first."""
        return parse(OperationsAnswer, self._send(Call("GET", "/operations"))).operations

    def operation(self, operation_id: str) -> OperationStatusAnswer:
        """Return the status of one operation."""
        return parse(OperationStatusAnswer, self._send(Call("GET", f"/operations/{operation_id}")))

    def cancel(self, operation_id: str) -> OperationStatusAnswer:
        """Cancel an operation that does not move memory yet; return its status once it has ended. Idempotent.

        Raises:
            ConflictError: it moves memory already and will complete, or it has ended otherwise.
        """
        return parse(OperationStatusAnswer, self._send(Call("DELETE", f"/operations/{operation_id}", long=True)))

    def events(self, operation_id: str) -> Iterator[Event]:
        """Yield the events of one operation until it has ended."""
        parser = EventParser()
        timeout = httpx.Timeout(self._target.timeout_s, read=None)
        try:
            with self._http.stream("GET", f"/operations/{operation_id}/events", timeout=timeout) as response:
                if not response.is_success:
                    response.read()
                    parse_json(response)
                for line in response.iter_lines():
                    if event := parser.feed(line):
                        yield event
        except httpx.TransportError as error:
            raise UnreachableError(self.address, str(error) or type(error).__name__, 1) from error

    def ready(self) -> bool:
        """Return whether the engine accepts requests now. Raises only UnreachableError."""
        return (self._send(Call("GET", "/readyz"))).is_success

    def alive(self) -> bool:
        """Return whether the engine's process and device context work. Raises only UnreachableError."""
        return (self._send(Call("GET", "/livez"))).is_success

    def generate(
        self, text: str | None = None, *, input_ids: Sequence[int] | None = None, **sampling_params: Any
    ) -> dict[str, Any]:
        """Generate from ``text`` or ``input_ids``; returns ``text``, ``output_ids`` and ``meta_info``.

        Raises:
            UnavailableError: memory is released.
        """
        return dict(parse_json(self._send(generate_call(text, input_ids, sampling_params))))

    def update_weights_from_disk(self, model_path: str | PathLike[str]) -> str:
        """Overwrite resident weights with a checkpoint folder that the server can read; returns the service's message.

        Raises:
            InvalidRequestError: the folder's model has another shape; nothing was written.
            ConflictError: the weights are released.
        """
        call = Call("POST", "/update_weights_from_disk", {"model_path": fspath(model_path)}, long=True)
        return parse(MessageAnswer, self._send(call)).message

    def update_weights_from_tensor(self, *safetensors: bytes) -> str:
        """As ``update_weights_from_disk``, from the content of safetensors files: one per rank."""
        payloads = [b64encode(image).decode() for image in safetensors]
        call = Call("POST", "/update_weights_from_tensor", {"serialized_named_tensors": payloads}, long=True)
        return parse(MessageAnswer, self._send(call)).message

    def flush_cache(self) -> None:
        """Forget cached prefixes."""
        parse(MessageAnswer, self._send(Call("POST", "/flush_cache")))

    def pause_generation(self, mode: str = "abort", *, timeout_s: float | None = None) -> None:
        """Stop generating until ``continue_generation``. Requests in flight: ``abort``, ``wait`` or ``keep``."""
        body = {"mode": mode} if timeout_s is None else {"mode": mode, "timeout_s": timeout_s}
        parse(MessageAnswer, self._send(Call("POST", "/pause_generation", body, long=True)))

    def continue_generation(self) -> str:
        """Generate again, at once or when all memory is resident; the message says which."""
        return parse(MessageAnswer, self._send(Call("POST", "/continue_generation"))).message

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _send(self, call: Call) -> httpx.Response:
        attempt = 1
        while True:
            try:
                return self._http.request(
                    call.method, call.path, json=call.body, headers=call.headers, timeout=self._target.timeout(call)
                )
            except httpx.TransportError as error:
                if attempt >= self._attempts or not call.may_repeat(error):
                    raise UnreachableError(self.address, str(error) or type(error).__name__, attempt) from error
            time.sleep(FIRST_DELAY_S * 2 ** (attempt - 1))
            attempt += 1
