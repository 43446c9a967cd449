"""A device that stands still: what the service says meanwhile."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx

import memsaver_core as ms
from memsaver_core._native import Saver


def test_everything_else_answers_while_a_copy_stalls(http: httpx.Client, driver: Saver) -> None:
    """S3: while a copy stands still, status, metrics, probes and operations answer, and name the phase."""
    before = driver.counts().get("copy_to_host", 0)
    driver.delay("copy_to_host", 3600)
    paths = ["/memory_occupation", "/metrics", "/livez", "/readyz", "/operations"]
    with ThreadPoolExecutor(1) as pool:
        release = pool.submit(http.post, "/release_memory_occupation")
        while driver.counts().get("copy_to_host", 0) == before:
            pass
        try:
            answers = {path: http.get(path) for path in paths for _ in range(5)}  # all while the copy stands still
        finally:
            driver.heal()
        assert answers["/memory_occupation"].json()["state"] == "releasing"
        assert (answers["/livez"].status_code, answers["/readyz"].status_code) == (200, 503)
        assert '"pause"' in answers["/operations"].text
        assert release.result().status_code == 200
    assert http.post("/resume_memory_occupation").status_code == 200


def test_the_last_reading_stands_while_the_device_does_not_answer(http: httpx.Client, driver: Saver) -> None:
    """S3: whoever asks what is occupied does not wait for the device; the state is told as it is now all the same."""
    before = http.get("/memory_occupation").json()["devices"]
    assert before
    calls = driver.counts()["memory_info"]
    driver.delay("memory_info", 5.0)
    with ThreadPoolExecutor(1) as pool:
        stuck = pool.submit(ms.read_devices)
        while driver.counts()["memory_info"] == calls:
            pass
        answers = [http.get("/memory_occupation").json() for _ in range(3)]
        assert not stuck.done()  # all of them came while the device was silent
        driver.heal()
    assert all(answer["devices"][0]["total_bytes"] == before[0]["total_bytes"] for answer in answers)
    assert all(answer["state"] == "resident" for answer in answers)
