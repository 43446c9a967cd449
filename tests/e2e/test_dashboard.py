"""The dashboard in a real browser: open it, release, see the drop, resume."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.waiting import wait_until

from .serving import Server, serving

playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
playwright.expect.set_options(timeout=60_000)

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a chromium on the PATH")

#: No sandbox, because containers have no user namespaces for one. Only our own page is loaded.
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
DESKTOP, PHONE = 1120, 390
MIB = 1 << 20


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.Browser]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: playwright.Browser, request: pytest.FixtureRequest) -> Iterator[playwright.Page]:
    """A page with a given width and colour scheme, which must report no error."""
    width, scheme = getattr(request, "param", (DESKTOP, "light"))
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(60_000)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
    yield page
    context.close()
    # The browser logs a missing key and a lost server too, beside the page.
    assert [error for error in errors if not error.startswith("Failed to load resource")] == []


def state(page: playwright.Page, is_now: str) -> None:
    playwright.expect(page.locator("#state")).to_have_text(is_now)


def used(page: playwright.Page) -> int:
    return int(page.locator(".device").get_attribute("data-used"))


def release(page: playwright.Page) -> None:
    page.get_by_role("button", name="Release all").click()
    page.get_by_role("dialog").get_by_role("button", name="Release").click()


def test_the_kv_cache_is_resized_by_a_slider(page: playwright.Page, server: Server) -> None:
    page.goto(server.url)
    state(page, "resident")
    full = used(page)
    slider, would = page.get_by_role("slider", name="Size of the KV cache"), page.locator("#kv-cache-would")
    playwright.expect(page.locator("#resize")).to_have_attribute("aria-disabled", "true")
    slider.fill("1")
    playwright.expect(would).to_contain_text("would go to the driver at once")
    page.locator("#resize").click()
    newest = page.locator("#operations > tr").first
    playwright.expect(newest).to_contain_text("resize")
    playwright.expect(newest).to_contain_text("done")
    playwright.expect(would).to_contain_text("Move the slider")
    wait_until(lambda: used(page) < full)
    slider.fill(slider.get_attribute("max"))
    playwright.expect(would).to_contain_text("would come from the driver.")
    page.locator("#resize").click()
    wait_until(lambda: used(page) == full)


@pytest.mark.parametrize(
    "page",
    [(DESKTOP, "light"), (DESKTOP, "dark"), (PHONE, "light"), (PHONE, "dark")],
    ids=["desktop, light", "desktop, dark", "phone, light", "phone, dark"],
    indirect=True,
)
def test_release_and_resume(page: playwright.Page, server: Server) -> None:
    page.goto(server.url)
    state(page, "resident")
    full = used(page)
    assert full > 64 * MIB
    release(page)
    state(page, "released")
    playwright.expect(page.locator("#admission")).to_contain_text("refused")
    wait_until(lambda: used(page) <= full - 64 * MIB)
    playwright.expect(page.locator("#tags tr:not(:has([data-state=released]))")).to_have_count(0)

    newest = page.locator("#operations > tr").first
    playwright.expect(newest).to_contain_text("done")
    playwright.expect(newest).to_contain_text("release")
    phases = page.get_by_role("table", name="Phases of release").first
    for phase in ("drain", "pause", "settle"):
        playwright.expect(phases.locator("tbody th", has_text=phase)).to_be_visible()
    playwright.expect(phases.locator("tr", has_text="pause")).to_contain_text("−")
    playwright.expect(page.locator("svg.chart .line")).to_have_count(1)
    playwright.expect(page.locator("svg.chart .band.release").first).to_be_attached()
    page.get_by_text("Operation", exact=True).and_(page.locator("#range span")).click()
    playwright.expect(page.locator("figcaption")).to_contain_text("release of all")
    playwright.expect(page.locator("svg.chart")).to_contain_text("pause")

    page.get_by_role("button", name="Resume all").click()
    state(page, "resident")
    page.wait_for_function(f"document.querySelector('.device').dataset.used >= {full}")
    assert page.evaluate(FAULTS) == []


def test_hibernate_and_wake(page: playwright.Page, server: Server) -> None:
    page.goto(server.url)
    state(page, "resident")
    page.get_by_role("button", name="Hibernate").click()
    dialog = page.get_by_role("dialog", name="Release all memory and hibernate?")
    dialog.get_by_role("button", name="Cancel").click()
    state(page, "resident")
    page.get_by_role("button", name="Hibernate").click()
    dialog.get_by_role("button", name="Hibernate").click()
    state(page, "hibernated")
    playwright.expect(page.locator("#admission")).to_contain_text("the process is hibernated")
    playwright.expect(page.get_by_role("button", name="Hibernate")).to_be_disabled()
    page.wait_for_function("document.querySelector('.device').dataset.used == 0")
    table = page.get_by_role("table", name="Phases of release").first
    playwright.expect(table).to_contain_text("hibernate")
    phases = table.locator("tbody th").all_inner_texts()
    assert {"trim_workspaces", "empty_cache", "trim_graphs", "trim_pinned", "hibernate"} <= set(phases)
    page.get_by_role("button", name="Resume all").click()
    state(page, "resident")
    table = page.get_by_role("table", name="Phases of resume").first
    playwright.expect(table).to_contain_text("reopen")  # its last phase: the state is told before it
    assert table.locator("tbody th").all_inner_texts()[:2] == ["wake", "restore"]


def test_one_tag_by_keyboard(page: playwright.Page, server: Server) -> None:
    page.goto(server.url)
    state(page, "resident")
    page.get_by_role("button", name="Release kv_cache").focus()
    page.keyboard.press("Enter")
    playwright.expect(page.get_by_role("dialog", name="Release kv_cache?")).to_be_visible()
    page.keyboard.press("Escape")
    playwright.expect(page.get_by_role("dialog")).to_be_hidden()
    state(page, "resident")
    page.keyboard.press("Enter")
    playwright.expect(page.get_by_role("dialog", name="Release kv_cache?")).to_be_visible()
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    state(page, "released")
    playwright.expect(page.get_by_role("button", name="Resume kv_cache")).to_be_focused()
    playwright.expect(page.get_by_role("button", name="Resume kv_cache")).to_be_enabled()
    page.keyboard.press("Enter")
    state(page, "resident")


def test_a_prepared_release_counts_down(page: playwright.Page, server: Server) -> None:
    from memsaver_server.client import Client

    page.goto(server.url)
    state(page, "resident")
    with Client(server.url) as client:
        prepared = client.release(["kv_cache"], prepare=True, lease_s=600)
        state(page, "prepared")
        said = page.locator("#admission")
        playwright.expect(said).to_contain_text(f"release {prepared.operation_id} of")
        playwright.expect(said).to_contain_text("s are left for its commit")
        client.abort(prepared.operation_id)
        state(page, "resident")


def test_somebody_else_s_operation_is_seen(page: playwright.Page, server: Server) -> None:
    from memsaver_server.client import Client

    page.goto(server.url)
    state(page, "resident")
    with Client(server.url) as client:
        client.release(["kv_cache"])
        state(page, "released")
        client.resume()
        state(page, "resident")


def test_the_key_stays_in_the_tab(page: playwright.Page) -> None:
    with serving(changes={"MEMSAVER_API_KEY": "ein Schlüssel"}) as server:
        page.goto(server.url)
        key = page.get_by_label("API key")
        key.fill("another")
        key.press("Enter")
        playwright.expect(page.get_by_role("alert")).to_contain_text("not the key")
        key.fill("ein Schlüssel")
        key.press("Enter")
        state(page, "resident")
        release(page)
        state(page, "released")
        assert page.evaluate("localStorage.length") == 0
        assert page.context.cookies() == []
        page.reload()
        state(page, "released")


def test_it_connects_again(page: playwright.Page) -> None:
    """A lost server is shown, and its successor is found without a reload."""
    with serving() as server:
        page.goto(server.url)
        state(page, "resident")
        port = server.url.rsplit(":", 1)[1]
    playwright.expect(page.get_by_role("alert")).to_contain_text("Not connected")
    playwright.expect(page.get_by_role("button", name="Release all")).to_be_disabled()
    with serving("--port", port):
        state(page, "resident")
        playwright.expect(page.get_by_role("alert")).to_be_hidden()


LONG_TAG = "a_tag_" + "x" * 300
REASON = "the content of weights is lost: " + "write it again by an update call, or release and resume it; " * 6
#: What holds in no width: the page or a table is wider than its room, a button is cut off or has two lines, or the
#: reason is cut off.
FAULTS = """() => {
    const faults = [];
    const wide = (what) => {
        if (what.scrollWidth > what.clientWidth + 1) faults.push(`${what.id || what.className} is cut`);
    };
    wide(document.documentElement);
    document.querySelectorAll(".scroll, #admission").forEach(wide);
    for (const button of document.querySelectorAll("button")) {
        const box = button.getBoundingClientRect();
        if (!box.width) continue;
        if (box.right > innerWidth || box.left < 0) faults.push(`${button.textContent} is outside`);
        const text = document.createRange();
        text.selectNodeContents(button.firstChild);
        if (text.getClientRects().length > 1) faults.push(`${button.textContent} has two lines`);
    }
    return faults;
}"""


def operation(number: int, status: str, **changes: Any) -> dict[str, Any]:
    about = {"operation": "release", "operation_id": f"id-{number}", "status": status, "tags": [LONG_TAG, "weights"]}
    times = {"created_at": number, "started_at": number, "finished_at": None, "seconds": 3.5, "phase_starts": [number]}
    return {**about, **times, "phase": "", "progress": None, "phases": [], "answer": None, "client": "c", **changes}


def communicators() -> list[dict[str, Any]]:
    """One of two ranks, and one that cannot be suspended."""
    sizes = {"suspendable_bytes": 480 << 20, "suspended_bytes": 0, "persistent_bytes": 4 << 20}
    one = {"name": "tensor-parallel", "ranks": 2, "suspended": False, "obstacle": "", **sizes}
    obstacle = "NCCL 2.28.9 can neither suspend nor count it; install NCCL 2.29.7 or later, " + LONG_TAG
    return [{**one, "rank": 0}, {**one, "rank": 1}, {**one, "name": LONG_TAG, "rank": 0, "obstacle": obstacle}]


def everything(**idle: Any) -> str:
    """A feed that shows every state at once; with ``idle``, fields of the occupation, no operation runs."""
    tags = []
    for name in ("weights", "kv_cache", "cuda_graph", "workspace", LONG_TAG):
        sizes = {"bytes": 5 << 30, "resident_bytes": 5 << 30, "released_bytes": 0, "retained_bytes": 0}
        tags.append({"tag": name, "restore": "discard", "state": "resident", "backed_up_bytes": 0, "kept_bytes": 0})
        tags[-1].update(sizes)
    tags[0].update(content="lost", backed_up_bytes=5 << 30, kept_bytes=3584 << 20)
    tags[1].update(state="releasing", released_bytes=1 << 30)
    sources = [{"kind": "tag", "name": tag["tag"], "bytes": 5 << 30} for tag in tags]
    sources.append({"kind": "process", "name": "context and modules, NCCL, torch outside regions", "bytes": 2 << 30})
    device = {"index": 0, "uuid": "", "name": "NVIDIA H200", "total_bytes": 139 << 30, "used_bytes": 27 << 30}
    occupation = {
        "at": 1e9,
        "enabled": True,
        "driver": "cuda",
        "state": "releasing",
        "hibernated": False,
        "engine": "an-engine-with-a-rather-long-name/" + "y" * 80,
        "admission": {"open": False, "reason": REASON},
        "tags": tags,
        "devices": [{**device, "free_bytes": 112 << 30, "sources": sources}],
        "ranks": [
            {"rank": 0, "pid": 4711, "alive": True, "state": "resident"},
            {"rank": 1, "pid": 4712, "alive": False, "state": "released"},
            {"rank": 2, "pid": 4713, "alive": True, "state": "resident", "stopped": True},
        ],
        "communicators": communicators(),
        "shared_by_ranks": ["MSCCL++ of sglang's group tp:0 is in use; leave out --enable-mscclpp"],
        "host_backup": {
            **{"bytes": 1 << 30, "file_bytes": 1 << 20, "capacity_bytes": 2 << 30, "limit_bytes": 8 << 30},
            "unused_bytes": 1 << 30,
            "shared_store": {"name": LONG_TAG, "processes": 2, "held_bytes": 1 << 30, "share_bytes": 512 << 20}
            | {"used_bytes": 1 << 30, "total_bytes": 2 << 30, "limit_bytes": 8 << 30},
        },
    }
    message = f"released 5 GiB of {LONG_TAG}, weights in 3.500 s"
    answer = {"message": message, "released_bytes": 5 << 30, "resumed_bytes": 0}
    events = [
        ("past", {"readings": []}),
        ("operation", operation(1, "succeeded", answer=answer, finished_at=4.5)),
        ("operation", operation(2, "cancelled", answer={"message": "cancelled by another caller"})),
        ("occupation", occupation | idle),
    ]
    if not idle:
        events.append(("operation", operation(3, "running", phase="drain")))
        events.append(("operation", operation(4, "queued", started_at=None, phase_starts=[])))
    return "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in events)


@pytest.mark.parametrize("page", [(width, "light") for width in (375, 768, 1280, 1920)], indirect=True)
def test_everything_has_its_place(page: playwright.Page, server: Server) -> None:
    page.route("**/dashboard/feed", lambda route: route.fulfill(body=everything(), content_type="text/event-stream"))
    page.goto(server.url)
    playwright.expect(page.locator("#tags tr")).to_have_count(5)
    playwright.expect(page.locator("#tags tr").first).to_contain_text("content lost")
    playwright.expect(page.locator("#ranks [data-state=dead]")).to_have_text("dead")
    playwright.expect(page.locator("#ranks [data-state=stopped]")).to_have_text("stopped")
    playwright.expect(page.locator("#tags tr").first).to_contain_text("3.50 GiB, 70 %")
    one = page.locator("#communicators tr", has_text="tensor-parallel").locator("td").all_text_contents()
    assert one == ["2", "960 MiB", "0", "8.00 MiB"]
    playwright.expect(page.locator("#obstacles")).to_contain_text("install NCCL 2.29.7 or later")
    playwright.expect(page.locator("#obstacles")).to_contain_text("leave out --enable-mscclpp")
    playwright.expect(page.locator("#backup")).to_contain_text("1.00 GiB of it for the next release")
    playwright.expect(page.locator("#backup")).to_contain_text("a share of 512 MiB (processes: 2;")
    playwright.expect(page.locator("#operations")).to_contain_text("cancelled")
    assert page.evaluate(FAULTS) == []
    page.get_by_role("button", name="id-1").click()  # its message has the long tag
    assert page.evaluate(FAULTS) == []


def test_a_fleet_of_which_a_part_is_released(page: playwright.Page, server: Server) -> None:
    """What is released in part can go either way, and the card of a release names its engines and tags."""
    about = {"alive": True, "url": "", "model": "m", "host": "h", "requests": 0, "error": "", "wanted": ""}
    engines = [
        {"name": "a", "state": "resident", "resident_bytes": 2 << 30, "released_bytes": 0, **about},
        {"name": "b", "state": "mixed", "resident_bytes": 1 << 30, "released_bytes": 1 << 30, **about},
    ]
    feed = everything(engines=engines, state="mixed")
    page.route("**/dashboard/feed", lambda route: route.fulfill(body=feed, content_type="text/event-stream"))
    page.goto(server.url)

    def offered(name: str) -> int:
        either = re.compile(f"^(Release|Resume) {name}$")
        return page.get_by_role("button", name=either).count()

    playwright.expect(page.locator("#engines tr")).to_have_count(2)
    assert [offered(name) for name in ("a", "b", "weights", "kv_cache")] == [1, 2, 1, 2]
    page.get_by_role("button", name="Release kv_cache").click()
    dialog = page.get_by_role("dialog", name="Release kv_cache?")
    playwright.expect(dialog).to_contain_text("It releases kv_cache on a, b.")


def test_operations_are_cancelled(page: playwright.Page, server: Server) -> None:
    asked: list[str] = []

    def refuse(route: playwright.Route) -> None:
        asked.append(f"{route.request.method} {route.request.url.removeprefix(server.url)}")
        route.fulfill(status=409, json={"message": "it moves memory already"})

    page.route("**/dashboard/feed", lambda route: route.fulfill(body=everything(), content_type="text/event-stream"))
    page.route("**/operations/*", refuse)
    page.goto(server.url)
    page.locator("#cancel").click()
    playwright.expect(page.get_by_role("alert")).to_contain_text("Could not cancel: it moves memory already")
    with page.expect_response("**/operations/id-4"):
        page.locator("#operations").get_by_role("button", name="Cancel").click()
    assert asked == ["DELETE /operations/id-3", "DELETE /operations/id-4"]
