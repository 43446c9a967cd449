"""Real vLLM's front end of several data-parallel engines, of which some are released. Nothing else of it runs."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from memsaver_core.contract.errors import AdmissionClosedError
from memsaver_server.integrations.vllm.engine import ApiServerEngine


def test_a_request_goes_to_an_engine_that_serves() -> None:
    """The counts of what each engine has are as without us."""
    from vllm.v1.engine.core_client import DPLBAsyncMPClient

    names = [number.to_bytes(2, "little") for number in range(3)]
    client = object.__new__(DPLBAsyncMPClient)
    later = hasattr(DPLBAsyncMPClient, "prepare_elastic_ep")  # 0.33: also how full its cache is
    client.core_engines, client.lb_engines = names, [[2 * number, 0, 0.9][: 2 + later] for number in range(3)]
    client.eng_start_index, client.client_count, client.reqs_in_flight = 0, 1, {}
    if later:
        client.engine_inflight, client.streaming_reqs = Counter(), set()
    engine = object.__new__(ApiServerEngine)
    engine._core, engine._excluded = client, frozenset({0})

    def chosen(name: str, rank: int | None = None) -> int:
        request = SimpleNamespace(request_id=name, data_parallel_rank=rank, pooling_params=None, resumable=False)
        return names.index(engine._choose(client.get_core_engine_for_request, request))

    given = [chosen(f"request-{number}") for number in range(20)]
    assert set(given) == {1, 2}
    assert Counter(client.reqs_in_flight.values()) == {names[number]: given.count(number) for number in (1, 2)}
    assert client.lb_engines[0] == [0, 0, 0.9][: 2 + later]
    with pytest.raises(AdmissionClosedError, match="engine 0 is released"):
        chosen("request-20", rank=0)
    assert "request-20" not in client.reqs_in_flight
    assert not later or client.engine_inflight[names[0]] == 0
    client.reqs_in_flight["request-21"] = names[0]
    engine._excluded = frozenset()
    assert chosen("request-22", rank=0) == 0
