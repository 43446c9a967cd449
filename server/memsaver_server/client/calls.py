"""The calls of the clients."""

from __future__ import annotations

import ssl
from base64 import b64encode
from collections.abc import Iterable, Sequence
from os import PathLike, fspath
from typing import Any, Literal, overload

import httpx
from typing_extensions import Unpack

from memsaver_core.contract.reports import (
    AcceptedAnswer,
    FleetPlanAnswer,
    MessageAnswer,
    OperationAnswer,
    OperationsAnswer,
    OperationStatusAnswer,
    PlanAnswer,
    PreparedAnswer,
    ResizedAnswer,
)
from memsaver_core.contract.requests import OperationName
from memsaver_core.contract.status import FleetOccupation, KvCacheAnswer, OccupationAnswer
from memsaver_server.address import DEFAULT_URL
from memsaver_server.client.keywords import ReleaseKeywords, ResizeKvCacheKeywords, ResumeKeywords
from memsaver_server.client.requests import (
    FIRST_DELAY_S,
    AnswerT,
    Call,
    Target,
    key_header,
    operation_call,
    parse,
    parse_json,
)

#: Keys of prepared operations that one client keeps at most.
MAX_KEYS = 256


class Caller:
    """Sends calls to one service; ``_request`` and ``_pause`` wait, or block."""

    #: httpx's classes of a client and of its transport.
    _client: type[Any]
    _transport: type[Any]

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
        transport: httpx.AsyncBaseTransport | httpx.BaseTransport | None = None,
    ) -> None:
        self._target = target = Target(url, uds, api_key, timeout_s, operation_timeout_s)
        self._attempts = attempts
        self._keys: dict[str, str] = {}  # of what this client has prepared, by the operation's id
        self._http = self._client(
            base_url=target.base_url,
            headers=target.headers,
            transport=transport or self._transport(uds=target.uds, verify=target.verifies(verify)),
        )

    @property
    def address(self) -> str:
        """The service's address, for messages."""
        return self._target.address

    async def _request(self, call: Call) -> httpx.Response:
        raise NotImplementedError

    async def _pause(self, seconds: float) -> None:
        raise NotImplementedError

    async def _send(self, call: Call) -> httpx.Response:
        attempt = 1
        while True:
            try:
                return await self._request(call)
            except httpx.RequestError as error:
                may_repeat = call.repeatable or isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))
                if attempt >= self._attempts or not may_repeat:
                    raise self._target.unreachable(error, attempt) from error
            await self._pause(FIRST_DELAY_S * 2 ** (attempt - 1))
            attempt += 1

    async def _ask(self, model: type[AnswerT], call: Call) -> AnswerT:
        answer = parse(model, await self._send(call))
        if isinstance(answer, (PreparedAnswer, AcceptedAnswer)):
            self._keys[answer.operation_id] = call.headers["Idempotency-Key"]
            if len(self._keys) > MAX_KEYS:
                del self._keys[next(iter(self._keys))]
        return answer

    def key_of(self, operation_id: str) -> str | None:
        """Return the key with which this client has prepared an operation: another one needs it to commit or abort."""
        return self._keys.get(operation_id)

    def _of(
        self, operation_id: str, method: str, path: str, key: str | None, body: dict[str, Any] | None = None
    ) -> Call:
        key = key or self.key_of(operation_id)
        headers = {} if key is None else key_header(key)
        return Call(method, f"/operations/{operation_id}{path}", body, headers, long=True)

    async def _update(self, source: str, version: str | None, weights: dict[str, Any]) -> str:
        body = weights if version is None else {**weights, "weight_version": version}
        call = Call("POST", f"/update_weights_from_{source}", body, long=True)
        return (await self._ask(MessageAnswer, call)).message


class Calls(Caller):
    """What both clients can call."""

    @overload
    async def release(
        self, tags: Iterable[str] | None = None, *, prepare: Literal[False] = False, **options: Unpack[ReleaseKeywords]
    ) -> OperationAnswer: ...

    @overload
    async def release(
        self, tags: Iterable[str] | None = None, *, prepare: Literal[True], **options: Unpack[ReleaseKeywords]
    ) -> PreparedAnswer: ...

    async def release(
        self, tags: Iterable[str] | None = None, *, prepare: bool = False, **options: Unpack[ReleaseKeywords]
    ) -> OperationAnswer | PreparedAnswer:
        """Release the device memory of ``tags`` (None: of all) to the driver.

        Args:
            prepare: do all that comes before: close admission, drain, check; then wait for ``commit`` or ``abort``.
            options: the other fields of ``memsaver_core.contract.requests.Release``. ``wait`` waits for a conflicting
                operation instead of raising ConflictError.

        Raises:
            InvalidRequestError: a tag is unknown; the message lists those that exist.
            DrainDeadlineError: requests were still in flight at the deadline.
            HostMemoryError: host memory for the backup is short.
        """
        call = operation_call("release", tags, options, *(["prepare"] if prepare else []))
        return await self._ask(PreparedAnswer if prepare else OperationAnswer, call)

    async def start_release(
        self, tags: Iterable[str] | None = None, *, prepare: bool = False, **options: Unpack[ReleaseKeywords]
    ) -> AcceptedAnswer:
        """As ``release``, but return once it has started; ``operation`` and ``events`` show its progress."""
        call = operation_call("release", tags, options, "async", *(["prepare"] if prepare else []))
        return await self._ask(AcceptedAnswer, call)

    @overload
    async def resume(
        self, tags: Iterable[str] | None = None, *, prepare: Literal[False] = False, **options: Unpack[ResumeKeywords]
    ) -> OperationAnswer: ...

    @overload
    async def resume(
        self, tags: Iterable[str] | None = None, *, prepare: Literal[True], **options: Unpack[ResumeKeywords]
    ) -> PreparedAnswer: ...

    async def resume(
        self, tags: Iterable[str] | None = None, *, prepare: bool = False, **options: Unpack[ResumeKeywords]
    ) -> OperationAnswer | PreparedAnswer:
        """Bring back the device memory of ``tags`` (None: of all that are released), at the same addresses.

        Args:
            prepare: only take the device memory, and wait for ``commit`` or ``abort``.
            options: the other fields of ``memsaver_core.contract.requests.Resume``.

        Raises:
            InvalidRequestError: a tag is unknown; the message lists those that exist.
            DeviceMemoryError: the device has too little free memory. All is still released; call again later.
        """
        call = operation_call("resume", tags, options, *(["prepare"] if prepare else []))
        return await self._ask(PreparedAnswer if prepare else OperationAnswer, call)

    async def start_resume(
        self, tags: Iterable[str] | None = None, *, prepare: bool = False, **options: Unpack[ResumeKeywords]
    ) -> AcceptedAnswer:
        """As ``resume``, but return once it has started; ``operation`` and ``events`` show its progress."""
        call = operation_call("resume", tags, options, "async", *(["prepare"] if prepare else []))
        return await self._ask(AcceptedAnswer, call)

    async def plan(
        self, /, operation: OperationName, tags: Iterable[str] | None = None, **options: Any
    ) -> PlanAnswer | FleetPlanAnswer:
        """Return what an operation with these arguments would do, at an engine or a coordinator."""
        response = await self._send(operation_call(operation, tags, options, "dry_run"))
        model: type[PlanAnswer | FleetPlanAnswer] = FleetPlanAnswer if _is_of_fleet(response) else PlanAnswer
        return parse(model, response)

    async def commit(self, operation_id: str, *, key: str | None = None) -> OperationAnswer:
        """Do what was prepared; return as ``release`` and ``resume`` do. Idempotent.

        Args:
            key: that of the client that has prepared it, by default this one; see ``key_of``.

        Raises:
            ConflictError: its lease has ended, or it was aborted, or prepared under another key; or as ``release``.
        """
        return await self._ask(OperationAnswer, self._of(operation_id, "POST", "/commit", key))

    async def abort(self, operation_id: str, *, key: str | None = None, force: bool = False) -> OperationStatusAnswer:
        """Undo the preparation of an operation; return its status once it has ended. Idempotent.

        Args:
            key: as for ``commit``.
            force: undo it also if another key has prepared it. The audit log names both callers.

        Raises:
            ConflictError: it was committed, or prepared under another key.
        """
        body = {"force": True} if force else None
        return await self._ask(OperationStatusAnswer, self._of(operation_id, "POST", "/abort", key, body))

    async def occupation(self) -> OccupationAnswer:
        """Return what the engine holds on its devices now; a ``FleetOccupation`` if a coordinator answers."""
        response = await self._send(Call("GET", "/memory_occupation"))
        return parse(FleetOccupation if _is_of_fleet(response) else OccupationAnswer, response)

    async def operations(self) -> list[OperationStatusAnswer]:
        """Return the operations that the service remembers, newest first."""
        return list((await self._ask(OperationsAnswer, Call("GET", "/operations"))).operations)

    async def operation(self, operation_id: str) -> OperationStatusAnswer:
        """Return the status of one operation."""
        return await self._ask(OperationStatusAnswer, Call("GET", f"/operations/{operation_id}"))

    async def cancel(self, operation_id: str) -> OperationStatusAnswer:
        """Cancel an operation that does not move memory yet; return its status once it has ended. Idempotent.

        Raises:
            ConflictError: it moves memory already and will complete, has ended otherwise, or is another's preparation.
        """
        return await self._ask(OperationStatusAnswer, self._of(operation_id, "DELETE", "", None))

    async def ready(self) -> bool:
        """Return whether the engine accepts requests now. Raises only UnreachableError."""
        return (await self._send(Call("GET", "/readyz"))).is_success

    async def alive(self) -> bool:
        """Return whether the engine's process and device context work. Raises only UnreachableError."""
        return (await self._send(Call("GET", "/livez"))).is_success

    async def generate(
        self, /, text: str | None = None, *, input_ids: Sequence[int] | None = None, **sampling_params: Any
    ) -> dict[str, Any]:
        """Generate from ``text`` or ``input_ids``; returns ``text``, ``output_ids`` and ``meta_info``.

        Raises:
            UnavailableError: memory is released.
        """
        prompt = {"text": text or ""} if input_ids is None else {"input_ids": list(input_ids)}
        body = {"sampling_params": sampling_params, **prompt}
        return dict(parse_json(await self._send(Call("POST", "/generate", body, repeatable=False, long=True))))

    async def update_weights_from_disk(self, model_path: str | PathLike[str], version: str | None = None) -> str:
        """Overwrite the weights with a checkpoint folder that the server can read; returns the service's message. Some
        engines can do so while the weights are released: the next resume brings in what was written. ``version`` names
        what the weights hold from then on; a resume may demand it as ``weights_version``.

        Raises:
            InvalidRequestError: the folder's model has another shape; nothing was written.
            ConflictError: the weights are released, and this engine updates only resident ones.
        """
        return await self._update("disk", version, {"model_path": fspath(model_path)})

    async def update_weights_from_tensor(self, *safetensors: bytes, version: str | None = None) -> str:
        """As ``update_weights_from_disk``, from the content of safetensors files: one per rank."""
        payloads = [b64encode(image).decode() for image in safetensors]
        return await self._update("tensor", version, {"serialized_named_tensors": payloads})

    async def kv_cache(self) -> KvCacheAnswer:
        """Return the size of the engine's KV cache, and the sizes that it can have now."""
        return await self._ask(KvCacheAnswer, Call("GET", "/kv_cache"))

    async def resize_kv_cache(self, **options: Unpack[ResizeKvCacheKeywords]) -> ResizedAnswer:
        """Make the KV cache smaller or larger while the engine serves.

        Args:
            options: the fields of ``memsaver_core.contract.requests.ResizeKvCache``; one of ``bytes``, ``fraction`` and
                ``tokens`` is the size.

        Raises:
            DrainDeadlineError: requests still used what was to go at the deadline; the cache is as before.
            DeviceMemoryError: the device has too little free memory; the cache is as before.
            ConflictError: the cache is released, or is being resized.
            OperationCancelledError: a release or a resume came while requests were waited for.
        """
        return await self._ask(ResizedAnswer, operation_call("resize", None, options))

    async def start_resize_kv_cache(self, **options: Unpack[ResizeKvCacheKeywords]) -> AcceptedAnswer:
        """As ``resize_kv_cache``, but return once it has started."""
        return await self._ask(AcceptedAnswer, operation_call("resize", None, options, "async"))

    async def flush_cache(self) -> None:
        """Forget cached prefixes."""
        await self._ask(MessageAnswer, Call("POST", "/flush_cache"))

    async def pause_generation(self, mode: str = "abort", *, timeout_s: float | None = None) -> None:
        """Stop generating until ``continue_generation``. Requests in flight: ``abort``, ``wait`` or ``keep``."""
        body = {"mode": mode} if timeout_s is None else {"mode": mode, "timeout_s": timeout_s}
        await self._ask(MessageAnswer, Call("POST", "/pause_generation", body, long=True))

    async def continue_generation(self) -> str:
        """Generate again, at once or when all memory is resident; the message says which."""
        return (await self._ask(MessageAnswer, Call("POST", "/continue_generation"))).message


def _is_of_fleet(response: httpx.Response) -> bool:
    return response.is_success and "engines" in parse_json(response)
