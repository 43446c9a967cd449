"""Pages of other sites in real browsers: whatever they send, by whichever address, releases nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

Serve = Callable[..., httpx.Client]

#: A page in the address space of this machine, as browsers call it: of another local server.
PAGE = """<!doctype html><title>page</title><body><script>
const hidden = {mode: 'no-cors', referrerPolicy: 'no-referrer'};
const load = (kind, url) => new Promise(end => {
  const node = document.createElement(kind);
  Object.assign(node, {referrerPolicy: 'no-referrer', onload: end, onerror: end, src: url});
  document.body.append(node);
});
const attempts = TARGETS.flatMap(target => [
  fetch(target + '/release_memory_occupation', {...hidden, method: 'POST'}),
  fetch(target + '/sleep', {method: 'POST', mode: 'no-cors'}),
  fetch(target + '/release_memory_occupation', hidden),
  fetch(target + '/release_memory_occupation', {mode: 'no-cors'}),
  load('img', target + '/release_memory_occupation'),
  load('iframe', target + '/release_memory_occupation'),
]);
const patience = new Promise(end => setTimeout(end, 20000));
Promise.race([Promise.allSettled(attempts), patience]).then(() => fetch('/done'));
</script>"""

CHROMIUM = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--host-resolver-rules=MAP engine 127.0.0.1", "--user-data-dir={profile}"),
]
FIREFOX = ["--headless", "--no-remote", "--profile", "{profile}"]
#: Firefox resolves a name without a dot to this machine, and asks nobody on its first start.
PREFERENCES = 'user_pref("network.dns.localDomains", "engine");\nuser_pref("datareporting.policy.firstRunURL", "");\n'


@pytest.fixture
def visit(tmp_path: Path) -> Iterator[Callable[[list[str], list[str]], None]]:
    """Open a page in a browser, and return once it has sent all of its requests to some targets."""
    pages: list[ThreadingHTTPServer] = []

    def run(browser: list[str], targets: list[str]) -> None:
        done = threading.Event()

        class Pages(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/html")
                self.end_headers()
                if self.path == "/done":
                    done.set()
                else:
                    self.wfile.write(PAGE.replace("TARGETS", json.dumps(targets)).encode())

            def log_message(self, *_: object) -> None:
                pass

        pages.append(ThreadingHTTPServer(("127.0.0.1", 0), Pages))
        threading.Thread(target=pages[-1].serve_forever, daemon=True).start()
        (tmp_path / "user.js").write_text(PREFERENCES)
        arguments = [each.format(profile=tmp_path) for each in browser]
        address = f"http://127.0.0.1:{pages[-1].server_address[1]}/"
        process = subprocess.Popen([*arguments, address], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            assert done.wait(600), "the page was not opened"
        finally:
            process.terminate()
            process.wait(600)

    yield run
    for each in pages:
        each.shutdown()
        each.server_close()


@pytest.mark.parametrize(("names", "options"), [(["chromium"], CHROMIUM), (["firefox-esr", "firefox"], FIREFOX)])
def test_a_page_of_another_server_releases_nothing(
    serve: Serve, visit: Callable[[list[str], list[str]], None], names: list[str], options: list[str]
) -> None:
    """By our address, others that lead here, and a name that is configured."""
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        pytest.skip(f"needs {names[0]} on the PATH")
    plain, named = serve(), serve(hosts="engine")
    hosts = ["127.0.0.1", "[::ffff:127.0.0.1]", "0.0.0.0", "engine"]
    targets = [f"http://{host}:{plain.base_url.port}" for host in hosts]
    visit([program, *options], [*targets, f"http://engine:{named.base_url.port}"])
    for http in (plain, named):
        assert http.get("/operations").json()["operations"] == []
        assert "memsaver_refused_requests_total{" in http.get("/metrics").text, "no request arrived"
