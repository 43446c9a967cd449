"""Verification by tokens: before a release and after the resume, before admission opens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import safetensors.torch

from memsaver_core.contract.errors import ConfigurationError
from memsaver_server import Gate, Settings, attach
from memsaver_server.engine import VerifiableEngine

from .tensor_engine import Memory, TensorEngine

TOKEN = {"verify": "token"}
PROMPT = {"input_ids": [3, 5, 8], "sampling_params": {"max_new_tokens": 6}}
Patch = pytest.MonkeyPatch
Serve = Callable[..., httpx.Client]


class VerifiedEngine(TensorEngine):
    """The test engine, which counts the verifications."""

    def __init__(self, memory: Memory) -> None:
        super().__init__(memory)
        self.verified = 0
        self.closed_meanwhile = True

    def verify_tokens(self) -> list[int]:
        self.verified += 1
        self.closed_meanwhile &= self.is_closed
        return [int(self.weights[token]) for token in range(1, 9)]


@pytest.fixture
def engine(memory: Memory) -> Iterator[VerifiedEngine]:
    engine = VerifiedEngine(memory)
    assert isinstance(engine, VerifiableEngine)
    yield engine
    engine.close()


def post(http: httpx.Client, path: str, body: object, status: int = 200) -> dict[str, object]:
    response = http.post(path, json=body)
    assert response.status_code == status, response.text
    answer: dict[str, object] = response.json()
    return answer


def release(http: httpx.Client, body: object = TOKEN) -> None:
    post(http, "/release_memory_occupation", body)


def resume(http: httpx.Client, body: object = TOKEN, status: int = 200) -> dict[str, object]:
    return post(http, "/resume_memory_occupation", body, status)


def error_of(answer: dict[str, object]) -> str:
    error = answer["error"]
    assert isinstance(error, dict)
    return str(error["type"])


def update(http: httpx.Client, engine: TensorEngine, folder: Path) -> None:
    """Write other weights, by a weight update."""
    safetensors.torch.save_file({"weights": engine.weights + 1}, folder / "weights")
    post(http, "/update_weights_from_disk", {"model_path": str(folder / "weights")})


def damage(engine: TensorEngine) -> None:
    engine.weights[5] += 1


def test_equal_tokens_pass_before_admission_opens(http: httpx.Client, engine: VerifiedEngine) -> None:
    release(http)
    answer = resume(http)
    phases = [phase["name"] for phase in answer["phases"]]  # type: ignore[attr-defined]
    assert phases.index("repair") < phases.index("verify") < phases.index("reopen")
    assert engine.verified == 2
    assert engine.closed_meanwhile
    assert http.post("/generate", json=PROMPT).status_code == 200


def test_other_tokens_fail_the_resume_and_keep_admission_closed(http: httpx.Client, engine: VerifiedEngine) -> None:
    """The memory is kept: content that passes again opens admission, by a plain resume, too."""
    release(http)
    resume(http)
    damage(engine)
    expected = [int(engine.weights[token]) - (token == 5) for token in range(1, 9)]
    got = [int(engine.weights[token]) for token in range(1, 9)]
    release(http)
    answer = resume(http, status=500)
    error = answer["error"]
    assert isinstance(error, dict)
    assert (error["type"], error["expected"], error["got"]) == ("verification_failed", expected, got)
    assert str(expected) in error["message"]
    assert str(got) in error["message"]

    occupation = http.get("/memory_occupation").json()
    assert occupation["state"] == "resident"
    assert not occupation["admission"]["open"]
    assert str(got) in http.get("/readyz").json()["reason"]
    assert http.get("/livez").status_code == 200
    assert http.post("/generate", json=PROMPT).status_code == 503

    resume(http, {}, status=500)
    engine.weights[5] -= 1
    resume(http, {})
    assert http.post("/generate", json=PROMPT).status_code == 200


def test_a_weight_update_ends_it(http: httpx.Client, engine: VerifiedEngine, tmp_path: Path) -> None:
    """Other tokens are right from then on, so that there is nothing to compare with until the next release."""
    release(http)
    resume(http)
    damage(engine)
    release(http)
    resume(http, status=500)
    update(http, engine, tmp_path)
    assert http.get("/readyz").status_code == 200
    release(http, {})
    assert error_of(resume(http, status=400)) == "verification_unavailable"
    assert http.get("/memory_occupation").json()["state"] == "released"
    resume(http, {})
    release(http)
    resume(http)


def test_discarded_weights_leave_nothing_to_compare(http: httpx.Client, engine: VerifiedEngine, tmp_path: Path) -> None:
    release(http, {**TOKEN, "restore": {"weights": "discard"}})
    answer = resume(http, status=400)
    assert error_of(answer) == "verification_unavailable"
    assert "discarded" in str(answer["message"])
    resume(http, {})
    update(http, engine, tmp_path)
    assert engine.verified == 1
    assert http.get("/readyz").status_code == 200


def test_a_part_is_verified_with_the_last_part(http: httpx.Client, engine: VerifiedEngine) -> None:
    """The prompt needs all memory; a resume that asks for verification is remembered until then."""
    release(http)
    resume(http, {**TOKEN, "tags": ["weights"]})
    assert engine.verified == 1
    damage(engine)
    resume(http, {}, status=500)
    assert engine.verified == 2


def test_the_setting_verifies_every_resume(serve: Serve, engine: VerifiedEngine) -> None:
    http = serve(verify_tokens=True)
    release(http, {})
    assert engine.verified == 1
    resume(http, {})
    assert engine.verified == 2
    release(http, {})
    resume(http, {})
    assert engine.verified == 3


def test_nothing_runs_unless_asked(http: httpx.Client, engine: VerifiedEngine) -> None:
    release(http, {})
    assert error_of(resume(http, status=400)) == "verification_unavailable"
    resume(http, {})
    assert engine.verified == 0


def test_a_prompt_that_fails_is_told(http: httpx.Client, engine: VerifiedEngine, monkeypatch: Patch) -> None:
    """Before a release nothing is released; after a resume the memory is kept and admission closed."""

    def fail() -> list[int]:
        raise RuntimeError("no such kernel")

    with monkeypatch.context() as broken:
        broken.setattr(engine, "verify_tokens", fail)
        answer = post(http, "/release_memory_occupation", TOKEN, 500)
        assert "no such kernel" in str(answer["message"])
        assert http.get("/readyz").status_code == 200
    release(http)
    with monkeypatch.context() as broken:
        broken.setattr(engine, "verify_tokens", fail)
        answer = resume(http, status=500)
        assert error_of(answer) == "verification_failed"
        assert "no such kernel" in str(answer["message"])
        assert http.get("/readyz").status_code == 503
    resume(http, {})
    assert http.get("/readyz").status_code == 200


def test_an_engine_that_cannot_be_verified(memory: Memory) -> None:
    with attach(Gate()) as attachment, httpx.Client(base_url=attachment.url, timeout=600, verify=False) as http:
        answer = post(http, "/release_memory_occupation", TOKEN, 400)
        assert error_of(answer) == "verification_unavailable"
        plan = post(http, "/release_memory_occupation", {**TOKEN, "dry_run": True})
        assert ["cannot be verified" in each for each in plan["blockers"]] == [True]
    with pytest.raises(ConfigurationError, match="MEMSAVER_VERIFY_TOKENS"):
        attach(Gate(), settings=Settings(verify_tokens=True))
