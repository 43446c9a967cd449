"""Unknown fields: misspelt ones are refused, those of known clients passed over, others named in the answer."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from memsaver_core.contract.reports import OperationAnswer
from memsaver_server.http.requests import MAX_VALUES

PROMPT = {"input_ids": [3, 5, 8], "sampling_params": {"max_new_tokens": 2}}


@pytest.mark.parametrize(
    ("path", "given", "meant"),
    [
        ("/release_memory_occupation", {"tag": ["kv_cache"]}, "tags"),
        ("/release_memory_occupation", {"tagz": ["kv_cache"]}, "tags"),
        ("/release_memory_occupation", {"Tags": ["kv_cache"]}, "tags"),
        ("/release_memory_occupation", {"dry-run": True}, "dry_run"),
        ("/release_memory_occupation", {"timeout": 3}, "timeout_s"),
        ("/release_memory_occupation", {"hibernat": False, "other": 1}, "hibernate"),
        ("/release_memory_occupation?tag=workspace", {}, "tags"),
        ("/resume_memory_occupation", {"tag": ["kv_cache"]}, "tags"),
        ("/release_memory", {"tag": ["kv_cache"]}, "tags"),
        ("/resume_memory", {"tagz": []}, "tags"),
        ("/release_kv_cache_memory", {"timeoutS": 3}, "timeout_s"),
        ("/sleep?lvl=0", {}, "level"),
        ("/sleep", {"levels": 0}, "level"),
        ("/wake_up?tag=weights", {}, "tags"),
        ("/pause_generation", {"mod": "wait"}, "mode"),
        ("/content_written", {"tag": ["weights"]}, "tags"),
        ("/content_written", {"weight_version": "step-1"}, "weights_version"),
        ("/resume_memory_occupation", {"weight_version": "step-1"}, "weights_version"),
        ("/update_weights_from_disk", {"weights_version": "step-1"}, "weight_version"),
        ("/update_weights_from_disk", {"model_paths": "/"}, "model_path"),
        ("/generate", {**PROMPT, "sampling_parms": {}}, "sampling_params"),
    ],
)
@pytest.mark.guards("a misspelt field was ignored, and everything was released")
def test_a_misspelt_field_is_refused_by_its_name(
    http: httpx.Client, path: str, given: dict[str, Any], meant: str
) -> None:
    refused = http.post(path, json=given)
    assert refused.status_code == 400
    assert f"did you mean {meant!r}" in refused.json()["message"]
    assert http.get("/memory_occupation").json()["state"] == "resident"
    assert http.get("/readyz").status_code == 200
    assert http.get("/operations").json()["operations"] == []


def test_fields_of_known_clients_are_passed_over(http: httpx.Client) -> None:
    sent = {"reset_connector": True, "model": "m", "weight_version": "7", "tags": ["kv_cache"], "tagz": None}
    answer = http.post("/release_memory_occupation", json=sent)
    assert answer.status_code == 200, answer.text
    assert answer.json()["ignored"] == ["reset_connector", "model", "weight_version"]
    flushed = http.get("/flush_cache", params={"reset_connector": True, "timeout": 60})
    assert flushed.json()["ignored"] == ["reset_connector", "timeout"]


@pytest.mark.parametrize(
    "path",
    [
        *("/release_memory_occupation", "/resume_memory_occupation", "/release_memory", "/resume_memory"),
        *("/sleep", "/wake_up", "/release_kv_cache_memory", "/sleep?level=0", "/wake_up?tags=scheduling"),
        *("/flush_cache", "/pause_generation", "/continue_generation", "/content_written"),
        *("/release_memory_occupation?async=1", "/release_memory_occupation?dry_run=1", "/generate"),
    ],
)
def test_any_other_field_is_named_in_the_answer(http: httpx.Client, path: str) -> None:
    sent = PROMPT if path == "/generate" else {}
    plain = http.post(path, json={**sent, "colour": None})
    http.post("/wake_up")
    answer = http.post(path, json={**sent, "colour": "red", "[b]é": 1})
    assert answer.status_code == plain.status_code
    assert answer.json()["ignored"] == ["colour", "[b]é"]
    assert answer.json().keys() - plain.json().keys() == {"ignored"}
    assert answer.headers.keys() == plain.headers.keys()


def test_clients_read_what_was_ignored(http: httpx.Client) -> None:
    answer = http.post("/release_memory_occupation?colour=red").json()
    assert OperationAnswer.model_validate(answer, extra="forbid").ignored == ("colour",)


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_the_end_of_what_is_prepared_names_what_it_ignores(http: httpx.Client, end: str) -> None:
    prepared = http.post("/release_memory_occupation", json={"prepare": True}, headers={"Idempotency-Key": "k"}).json()
    path = f"/operations/{prepared['operation_id']}/{end}"
    answer = http.post(path, json={"colour": "red"}, headers={"Idempotency-Key": "k"}).json()
    assert answer["ignored"] == ["colour"]


def test_unknown_fields_without_number_are_refused(http: httpx.Client) -> None:
    many = {f"{number}": number for number in range(5000)}
    refused = http.post("/release_memory_occupation", json=many)
    assert refused.status_code == 400
    assert "5000 unknown fields" in refused.json()["message"]


@pytest.mark.parametrize("path", ["/release_memory_occupation", "/release_memory", "/sleep", "/flush_cache"])
@pytest.mark.guards("one large request held up all others")
def test_a_memory_call_takes_no_large_body(http: httpx.Client, path: str) -> None:
    refused = http.post(path, content=b'{"tags": [' + b"[]," * 30_000 + b"[]]}")
    assert refused.status_code == 413
    assert "larger than 65536 bytes" in refused.json()["message"]
    assert http.get("/memory_occupation").json()["state"] == "resident"


def test_a_refusal_names_a_few_of_many_errors(http: httpx.Client) -> None:
    refused = http.post("/release_memory_occupation", json={"tags": [1] * 1000})
    assert refused.status_code == 400
    assert "992 more" in refused.json()["message"]
    assert len(refused.content) < 2000


@pytest.mark.guards("one large request held up all others")
def test_a_prompt_has_no_more_values_than_can_be_parsed_at_once(http: httpx.Client) -> None:
    """Text may have any number of commas and brackets."""
    for values in (b"[]," * MAX_VALUES + b"[]", b'"",' * (2 * MAX_VALUES) + b'""'):
        refused = http.post("/generate", content=b'{"input_ids": [' + values + b"]}")
        assert refused.status_code == 400
        assert f"more than {MAX_VALUES} values" in refused.json()["message"]
    long = {**PROMPT, "rid": '[,{\\"' * MAX_VALUES}
    assert http.post("/generate", json=long).json()["meta_info"]["id"] == long["rid"]


@pytest.mark.parametrize("path", ["/release_memory_occupation", "/resume_memory", "/sleep", "/generate"])
@pytest.mark.parametrize("body", ['{"tags": ["\\ud800"]}', '{"\\udfff": 1}', '{"a": {"b": ["\\ude00\\ud83d"]}}'])
def test_an_unpaired_surrogate_is_refused(http: httpx.Client, path: str, body: str) -> None:
    """As an escape, or encoded in any way that JSON may be."""
    raw = json.loads(f"[{body}]", parse_constant=str)[0]
    encoded = json.dumps(raw, ensure_ascii=False)
    for sent in (body.encode(), encoded.encode("utf-8", "surrogatepass"), encoded.encode("utf-16", "surrogatepass")):
        assert http.post(path, content=sent).status_code == 400
    assert http.get("/memory_occupation").json()["state"] == "resident"


def test_an_unpaired_surrogate_in_the_query_is_refused(http: httpx.Client) -> None:
    for query in ("tags=%ED%A0%80", "tag%ED%A0%80=weights", "mode=%ED%A0%80"):
        assert http.post(f"/release_memory_occupation?{query}").status_code == 400
