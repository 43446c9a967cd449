"""The dashboard as the server sends it: its files, access to them, and the feed of its data."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

import memsaver_server
from memsaver_server.routes.dashboard import FILES

from .tensor_engine import KV_BYTES

FOLDER = Path(memsaver_server.__file__).parent / "dashboard"
LINK = re.compile(r"""(?:src|href)="([^"#]+)"|from "\./([^"]+)"|url\(""")


def feed(http: httpx.Client) -> Iterator[tuple[str, dict[str, object]]]:
    with http.stream("GET", "/dashboard/feed") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        name = ""
        for line in stream.iter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                yield name, json.loads(line.removeprefix("data: "))


def test_every_file_is_served_and_no_other(http: httpx.Client) -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(FILES)
    for name, kind in FILES.items():
        response = http.get(f"/dashboard/{name}")
        assert response.status_code == 200
        assert response.headers["content-type"].removesuffix("; charset=utf-8") == kind
        assert response.content == (FOLDER / name).read_bytes()
    assert http.get("/").text == (FOLDER / "index.html").read_text()
    for name in ("..%2fapp.py", "%2e%2e/app.py", "style.css.map", "feed.py"):
        assert http.get(f"/dashboard/{name}").status_code == 404


def test_the_page_takes_nothing_from_elsewhere(http: httpx.Client) -> None:
    """It works without a network, and its content policy allows only this server's scripts."""
    for name in FILES:
        text = http.get(f"/dashboard/{name}").text
        for in_page, in_script in LINK.findall(text):
            assert in_page.removeprefix("dashboard/") in FILES or in_script in FILES
    page = http.get("/")
    assert not re.search(r"<script(?![^>]*src=)|\son\w+=|\sstyle=|<style", page.text)
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy


def test_the_page_is_open_and_its_feed_asks_for_the_key(serve: Callable[..., httpx.Client]) -> None:
    http = serve(api_key="the key")
    assert http.get("/").status_code == 200
    assert http.get("/dashboard/page.js").status_code == 200
    assert http.get("/dashboard/feed").status_code == 401
    http.headers["Authorization"] = "Bearer the key"
    assert next(feed(http))[0] == "past"
    http.headers["Sec-Fetch-Site"] = "cross-site"
    assert http.get("/dashboard/feed").status_code == 403


def test_the_feed_tells_what_is_held_and_what_happens(http: httpx.Client) -> None:
    told = feed(http)
    assert next(told)[0] == "past"
    before = next(data for name, data in told if name == "occupation" and data["devices"])
    assert before["state"] == "resident"
    with httpx.Client(base_url=http.base_url, timeout=600, verify=False) as other:
        other.post("/release_memory_occupation", json={"tags": ["kv_cache"]}).raise_for_status()
        done = next(data for name, data in told if name == "operation" and data["status"] == "succeeded")
        after = next(data for name, data in told if name == "occupation" and data["state"] == "released")
    assert done["phases"][0]["name"] == "drain"
    assert len(done["phase_starts"]) == len(done["phases"])
    assert sorted(done["phase_starts"]) == done["phase_starts"]
    assert before["devices"][0]["used_bytes"] - after["devices"][0]["used_bytes"] >= KV_BYTES
    assert after["at"] >= done["started_at"]


def test_readings_are_remembered(http: httpx.Client) -> None:
    """The page shows what was measured before it was opened."""
    told = feed(http)
    seen = [data["at"] for _, data in (next(told) for _ in range(6)) if "devices" in data]
    told.close()
    past = next(feed(http))[1]["readings"]
    assert past[0]["at"] <= seen[-1]
    assert set(past[0]["used_bytes"]) == {"0"}
