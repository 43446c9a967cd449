"""The image of an engine with memsaver in it: what its Dockerfile copies, and what its commands do."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy/engine.Dockerfile"
OURS = ROOT / "deploy/torch-memory-saver"
#: Stands in for Python and pip of the image: it writes down its arguments. ``INSTALLED`` is what pip lists.
PYTHON = """#!/bin/sh
echo "$*" >>"$CALLS"
case "$*" in
  *" list "*) echo "$INSTALLED" ;;
  *" show --quiet "*) case "$INSTALLED" in *"$5=="*) ;; *) exit 1 ;; esac ;;
esac
"""


def command(folder: Path, stage: str) -> str:
    """The RUN of a stage, in ``folder`` instead of /opt/memsaver."""
    (found,) = re.findall(r"^RUN (.*?[^\\])\n", stages()[stage], re.DOTALL | re.MULTILINE)
    return str(found).replace("/opt/memsaver", str(folder))


def stages() -> dict[str, str]:
    """The lines of each stage, by its name."""
    parts = re.split(r"^FROM (?:\S+) AS (\w+)\n", DOCKERFILE.read_text(), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.fixture
def image(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin/python3"
    python.write_text(PYTHON)
    python.chmod(0o755)
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist/memsaver-0.1.0-cp312-cp312-linux_x86_64.whl").touch()
    return tmp_path


def run(image: Path, installed: str, stage: str = "engine") -> tuple[int, list[str]]:
    """Run the command; return its exit status and the calls of Python that change the image."""
    ran = subprocess.run(
        ["/bin/sh", "-c", command(image, stage)],
        env={"PATH": f"{image}/bin:/usr/bin:/bin", "CALLS": str(image / "calls"), "INSTALLED": installed},
        check=False,
    )
    calls = [
        call.removeprefix("-m pip ") for call in (image / "calls").read_text().replace(f"{image}/", "").splitlines()
    ]
    return ran.returncode, [call for call in calls if not call.startswith(("list ", "show "))]


@pytest.mark.parametrize("engine", ["vllm==0.26.0", "sglang==0.5.17\ntorch_memory_saver==0.0.10"])
def test_packages_of_the_engine_stay(image: Path, engine: str) -> None:
    status, changes = run(image, f"torch==2.11.0+cu130\n{engine}")
    assert status == 0
    assert changes == ["install -c engine.txt dist/memsaver-0.1.0-cp312-cp312-linux_x86_64.whl[server]"]
    assert (image / "engine.txt").read_text() == "torch==2.11.0+cu130\n", "its torch is not exchanged"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_each_target_is_for_one_engine(image: Path, engine: str) -> None:
    assert run(image, f"torch==2.11.0\n{engine}==1.0", stage=engine) == (0, [])
    assert run(image, "torch==2.11.0\nanother==1.0", stage=engine) == (1, [])
    set_there = set(re.findall(r"\b(MEMSAVER_\w+)=1\b", stages()[engine]))
    assert set_there == {f"MEMSAVER_{engine.upper()}"}


#: By name, what a distribution requires, and its files. Two have a module of the same name.
DISTRIBUTIONS = {
    "sglang": (["torch_memory_saver>=0.0.9.post1"], {}),
    "torch_memory_saver": ([], {"torch_memory_saver/__init__.py": "theirs = True\n"}),
    "memsaver_torch_memory_saver": (
        ["memsaver[server]>=0.1"],
        {"torch_memory_saver/__init__.py": (OURS / "torch_memory_saver/__init__.py").read_text()},
    ),
}


def wheel(folder: Path, name: str) -> Path:
    """Write the distribution ``name`` into ``folder``."""
    requires, files = DISTRIBUTIONS[name]
    path = folder / f"{name}-1.0-py3-none-any.whl"
    needed = "".join(f"Requires-Dist: {each}\n" for each in requires)
    about = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needed}",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in (files | {f"{name}-1.0.dist-info/{each}": about[each] for each in about}).items():
            archive.writestr(member, text)
    return path


@pytest.mark.parametrize(
    "installed",
    [
        ("torch_memory_saver",),
        ("torch_memory_saver", "memsaver_torch_memory_saver"),
        ("memsaver_torch_memory_saver", "torch_memory_saver"),
    ],
    ids=", ".join,
)
def test_what_sglang_requires_stays_and_memsavers_is_used(tmp_path: Path, installed: tuple[str, ...]) -> None:
    """Whichever module was installed last: nothing that is installed lacks what it requires, and without the
    plugin the doctor says whose it is."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "above.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(venv / "bin/python")]
    for name in ("sglang", *installed):
        subprocess.run([*pip, "install", "-q", "--no-deps", "--no-index", wheel(tmp_path, name)], check=True)
    ran = subprocess.run([*pip, "check"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
    used = """
from importlib.metadata import entry_points
(found,) = [each for each in entry_points(group="sglang.srt.plugins") if each.name == "memsaver"]
try:
    found.load()()
except ModuleNotFoundError as error:  # SGLang itself
    assert error.name == "sglang", error
import torch_memory_saver
print(torch_memory_saver.__name__)
"""

    def output(*arguments: str, **changes: str) -> str:
        environment = {**os.environ, "MEMSAVER_DRIVER": "host", **changes}
        command = [venv / "bin/python", *arguments]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert ran.stdout, ran.stderr
        return ran.stdout

    assert output("-c", used, MEMSAVER_SGLANG="1") == "memsaver_core.compat.torch_memory_saver\n"
    findings = json.loads(output("-m", "memsaver_server.cli", "doctor", "--json"))
    (found,) = [each["found"] for each in findings if each["subject"] == "torch_memory_saver"]
    assert str(site) in found
    assert found.startswith("another one than memsaver's" if installed[-1] == "torch_memory_saver" else "memsaver's")


def test_an_image_without_torch_is_none_of_an_engine(image: Path) -> None:
    status, changes = run(image, "pip==25.0")
    assert status != 0
    assert changes == []


def test_what_is_copied_is_in_the_context() -> None:
    ignore = (ROOT / ".dockerignore").read_text().split()
    copied = re.findall(r"^COPY (\S+) ", DOCKERFILE.read_text(), re.MULTILINE)
    assert copied == ["dist"]
    assert {f"!{name}" for name in copied} <= set(ignore)


def test_the_images_are_of_versions_that_have_run() -> None:
    assert f"Run with vLLM {version_of('vllm/vllm-openai')}." in (ROOT / "docs/vllm.md").read_text()
    row = rf"^\| {re.escape(version_of('lmsysorg/sglang'))} \| .* \| run: "
    assert re.search(row, (ROOT / "docs/sglang.md").read_text(), re.MULTILINE)


def version_of(image: str) -> str:
    """The one version of an image that the Dockerfile and the page name."""
    (version,) = {
        found
        for path in (DOCKERFILE, ROOT / "deploy/README.md")
        for found in re.findall(rf"{image}:v([\d.]+)", path.read_text())
    }
    return version


def test_the_validator_has_no_complaints() -> None:
    validator = shutil.which(str(Path(sys.executable).with_name("hadolint"))) or shutil.which("hadolint")
    if validator is None:
        pytest.skip("hadolint is not installed")
    ran = subprocess.run([validator, DOCKERFILE], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
