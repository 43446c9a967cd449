"""Check an install of memsaver without extras: the client works, and nothing of the service is there.

Runs on the Python of that install, which needs nothing else.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points, requires
from importlib.util import find_spec

SERVICE = ("torch", "numpy", "fastapi", "uvicorn", "pydantic_settings", "prometheus_client", "pynvml", "typer", "rich")


def main() -> None:
    found = [name for name in SERVICE if find_spec(name)]
    assert not found, f"installed without an extra: {', '.join(found)}"

    from memsaver_server.client import AsyncClient, Client, UnreachableError

    with Client("http://127.0.0.1:9") as client:
        try:
            client.occupation()
        except UnreachableError:
            pass
        else:
            raise AssertionError("something answers on port 9")
    assert AsyncClient
    core = {name for name in sys.modules if name.startswith("memsaver_core.")}
    core -= {name for name in core if name.split(".")[1] == "contract"}
    assert not core, f"the client imports of the core more than its contract: {', '.join(sorted(core))}"

    (script,) = (entry for entry in entry_points(group="console_scripts") if entry.name == "memsaver")
    program = f"from {script.module} import {script.attr} as main; main()"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    said = ran.stderr.strip()
    assert ran.returncode == 1, ran
    assert "memsaver[cli]" in said, said
    assert len(said.splitlines()) == 1, said
    assert requires("memsaver")
    print(f"memsaver without extras: the client imports, `memsaver` says: {said}")


if __name__ == "__main__":
    main()
