"""A client-only install: what runs without torch and FastAPI, and what is said where they are needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests import forks

SERVER_PACKAGES = ("torch", "fastapi", "starlette", "uvicorn", "pydantic_settings", "prometheus_client", "transformers")
#: What the client and the command line do not load: of the core they use the contract alone.
NOT_LOADED = ("memsaver_core.process", *SERVER_PACKAGES)

#: Runs the ``memsaver`` command and prints which of the packages were imported.
COMMAND = f"""
import sys
from memsaver_server.cli import main

sys.argv[0] = "memsaver"
try:
    main()
finally:
    print([name for name in {NOT_LOADED} if sys.modules.get(name)], file=sys.stderr)
"""


def without(*packages: str) -> str:
    """A program's first lines, after which these packages cannot be imported."""
    return f"import sys\nsys.modules.update(dict.fromkeys({packages}))\n"


def python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)


def fork(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """For a program that loads torch: in a fork that has loaded it, and nothing of memsaver."""
    command = [sys.executable, "-c", program, *arguments]
    environment = {**os.environ, "MEMSAVER_DRIVER": "host"}
    return forks.run(command, env=environment, capture_output=True, text=True, loaded=False)


@pytest.mark.parametrize("module", ["", ".client", ".fleet"])
def test_the_client_loads_neither_torch_nor_fastapi(module: str) -> None:
    ran = python(f"import memsaver_server{module}, sys; print([name for name in {NOT_LOADED} if name in sys.modules])")
    assert (ran.stdout, ran.stderr) == ("[]\n", "")


def test_the_client_builds_no_model_before_it_is_used() -> None:
    """Building all takes as long as the rest of the import."""
    ran = python(
        "import memsaver_server.client.sync, pydantic\n"
        "models = pydantic.BaseModel.__subclasses__()\n"
        "for model in models: models += model.__subclasses__()\n"
        "ours = {model for model in models if model.__module__.startswith('memsaver')}\n"
        "print(len(ours) > 20, [model.__name__ for model in ours if model.__pydantic_complete__])"
    )
    assert (ran.stdout, ran.stderr) == ("True []\n", "")


@pytest.mark.parametrize(("url", "loads"), [("http://localhost", False), ("https://localhost", True)])
def test_the_authorities_of_certificates_are_loaded_for_https_alone(url: str, loads: bool) -> None:
    ran = python(
        "import ssl, sys\n"
        "ssl.SSLContext.load_verify_locations = lambda *a, **k: print('loads')\n"
        "from memsaver_server import Client\n"
        "Client(sys.argv[1])",
        url,
    )
    assert (ran.stdout, ran.stderr) == ("loads\n" if loads else "", "")


def test_a_command_loads_what_it_needs() -> None:
    """Nothing of the commands that examine or serve the engine."""
    heavy = ("memsaver_server.doctor", "memsaver_server.attachment", "memsaver_server.reference", "uvicorn", "asyncio")
    ran = python(COMMAND.replace(repr(NOT_LOADED), repr(heavy)), "status", "--uds", "/nowhere")
    assert ran.returncode == 3, ran.stderr
    assert ran.stderr.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["release", "--help"], 0),
        (["status", "--uds", "/nowhere"], 3),
        (["release", "--uds", "/nowhere"], 3),
        (["watch", "--uds", "/nowhere"], 3),
        (["fleet", "status", "--members", "/nowhere"], 2),
        (["top", "--uds", "/nowhere"], 3),
    ],
)
def test_the_command_line_needs_neither(arguments: list[str], code: int) -> None:
    ran = python(without(*SERVER_PACKAGES) + COMMAND, *arguments)
    assert ran.returncode == code, ran.stderr
    assert ran.stderr.splitlines()[-1] == "[]"
    assert "Traceback" not in ran.stderr


#: The packages of all extras but ``cli``, hidden as they are where they are not installed.
ONLY_CLI = (*SERVER_PACKAGES, "numpy", "safetensors", "psutil", "pynvml", "yaml", "dns", "sniffio", "ray")
HIDDEN = f"""
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {ONLY_CLI} else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
"""


@pytest.mark.parametrize(
    ("command", "code", "extra"),
    [
        ("doctor", 0, "server"),
        ("serve", 1, "engine"),
        ("kv-cache 50% --uds /nowhere", 3, ""),
        ("top --uds /nowhere", 3, ""),
        ("store list nowhere", 3, ""),
        ("store pin nowhere x", 3, ""),
        ("fleet serve --members ray", 1, "server,fleet"),
        ("fleet status --members /nowhere", 2, "fleet"),
        ("fleet watch --members dns:nowhere:1", 2, "fleet"),
        ("fleet release --members ray", 2, "ray"),
    ],
)
def test_a_command_without_its_extra_names_it(command: str, code: int, extra: str) -> None:
    ran = python(HIDDEN + COMMAND, *command.split())
    said = " ".join((ran.stdout + ran.stderr).replace("│", " ").split())
    assert (ran.returncode, "Traceback" in said) == (code, False), said
    assert f"install 'memsaver[{extra}]'" in said if extra else "not installed" not in said


@pytest.mark.parametrize("extra", ["fleet", "server,fleet"])
def test_ray_has_another_extra(extra: str) -> None:
    ran = python(
        without("ray")
        + f"""from memsaver_server.fleet import membership_of
from memsaver_server.missing_package import missing_package
try: membership_of("ray")
except ModuleNotFoundError as error: print(missing_package(error, {extra!r}))"""
    )
    assert "the package 'ray' of the extra 'ray' is not installed: pip install 'memsaver[ray]'" in ran.stdout, ran


def test_a_name_that_needs_more_says_how_to_install_it() -> None:
    names = ("attach", "create_app", "Settings", "Gate", "ModuleEngine")
    ran = python(
        without(*SERVER_PACKAGES)
        + f"import memsaver_server\nfor name in {names}:\n"
        + "    try: getattr(memsaver_server, name)\n    except ImportError as error: print(error)"
    )
    lines = ran.stdout.splitlines()
    assert ["pip install 'memsaver[server]'" in line for line in lines] == [True] * len(names), lines


def test_help_is_printed_without_what_a_connection_needs() -> None:
    ran = python(without("httpx", "pydantic") + COMMAND, "--help")
    assert ran.returncode == 0, ran.stderr
    assert "release" in ran.stdout


@pytest.mark.parametrize("missing", [SERVER_PACKAGES, ("torch",), ("fastapi",), ("transformers",), ("safetensors",)])
def test_serve_without_a_package_is_one_sentence(missing: tuple[str, ...]) -> None:
    ran = fork(without(*missing) + COMMAND, "serve", "--port", "0")
    assert ran.returncode == 1
    (sentence,) = (line for line in ran.stderr.splitlines() if line.startswith("memsaver:"))
    assert "pip install 'memsaver[engine]', or in a checkout pip install '.[engine]'" in sentence
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("missing", "extra"), [("torch", "server"), ("pydantic_settings", "server"), ("fastapi", "server")]
)
def test_doctor_names_the_extra_of_a_missing_package(missing: str, extra: str) -> None:
    ran = fork(without(missing) + COMMAND, "doctor", "--json")
    assert ran.returncode == 1
    assert any(
        finding["level"] == "blocked" and f"pip install '.[{extra}]'" in finding["remedy"]
        for finding in json.loads(ran.stdout)
    )
    assert "Traceback" not in ran.stderr


def test_the_command_without_its_packages_is_one_sentence() -> None:
    ran = python(without("typer") + COMMAND, "status")
    assert ran.returncode == 1
    assert "pip install 'memsaver[cli]'" in ran.stderr
    assert "Traceback" not in ran.stderr
