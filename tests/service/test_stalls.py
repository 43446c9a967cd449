"""A device that stands still: what the service says meanwhile."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx

from memsaver_core._native import Saver


def test_everything_else_answers_while_a_copy_stalls(http: httpx.Client, driver: Saver) -> None:
    """S3: while a copy stands still, status, metrics, probes and operations answer, and name the phase."""
    before = driver.counts().get("copy_to_host", 0)
    driver.delay("copy_to_host", 2.0)
    paths = ["/memory_occupation", "/metrics", "/livez", "/readyz", "/operations"]
    with ThreadPoolExecutor(1) as pool:
        release = pool.submit(http.post, "/release_memory_occupation")
        while driver.counts().get("copy_to_host", 0) == before:
            pass
        driver.heal()  # those that come later are not held up
        answers = {path: http.get(path) for path in paths for _ in range(5)}
        assert not release.done()  # all of them came while the copy stood still
        assert answers["/memory_occupation"].json()["state"] == "releasing"
        assert (answers["/livez"].status_code, answers["/readyz"].status_code) == (200, 503)
        assert '"pause"' in answers["/operations"].text
        assert release.result().status_code == 200
    assert http.post("/resume_memory_occupation").status_code == 200
