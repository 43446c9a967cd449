"""The image of an engine with memsaver in it: what its Dockerfile copies, and what its commands do."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy/engine.Dockerfile"
#: Stands in for Python and pip of the image: it writes down its arguments. ``INSTALLED`` is what pip lists.
PYTHON = """#!/bin/sh
echo "$*" >>"$CALLS"
case "$*" in
  *" list "*) echo "$INSTALLED" ;;
  *" show "*) case "$INSTALLED" in *torch_memory_saver*) ;; *) exit 1 ;; esac ;;
esac
"""


def command(folder: Path) -> str:
    """The RUN of the Dockerfile, in ``folder`` instead of /opt/memsaver."""
    (found,) = re.findall(r"^RUN (.*?[^\\])\n", DOCKERFILE.read_text(), re.DOTALL | re.MULTILINE)
    return str(found).replace("/opt/memsaver", str(folder))


@pytest.fixture
def image(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin/python3"
    python.write_text(PYTHON)
    python.chmod(0o755)
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist/memsaver-0.1.0-cp312-cp312-linux_x86_64.whl").touch()
    return tmp_path


def run(image: Path, installed: str) -> tuple[int, list[str]]:
    """Run the command; return its exit status and the calls of Python that change the image."""
    ran = subprocess.run(
        ["/bin/sh", "-c", command(image)],
        env={"PATH": f"{image}/bin:/usr/bin:/bin", "CALLS": str(image / "calls"), "INSTALLED": installed},
        check=False,
    )
    calls = [
        call.removeprefix("-m pip ") for call in (image / "calls").read_text().replace(f"{image}/", "").splitlines()
    ]
    return ran.returncode, [call for call in calls if not call.startswith(("list ", "show "))]


def test_an_engine_without_torch_memory_saver(image: Path) -> None:
    status, changes = run(image, "torch==2.11.0+cu130\nvllm==0.26.0")
    assert status == 0
    assert changes == ["install -c engine.txt dist/memsaver-0.1.0-cp312-cp312-linux_x86_64.whl[server]"]
    assert (image / "engine.txt").read_text() == "torch==2.11.0+cu130\n", "its torch is not exchanged"


def test_an_engine_that_imports_torch_memory_saver(image: Path) -> None:
    status, changes = run(image, "torch==2.11.0+cu130\ntorch_memory_saver==0.0.10")
    assert status == 0
    assert changes[1:] == ["uninstall -y torch_memory_saver", "install -c engine.txt torch-memory-saver"]


def test_an_image_without_torch_is_none_of_an_engine(image: Path) -> None:
    status, changes = run(image, "pip==25.0")
    assert status != 0
    assert changes == []


def test_what_is_copied_is_in_the_context() -> None:
    ignore = (ROOT / ".dockerignore").read_text().split()
    copied = re.findall(r"^COPY (\S+) ", DOCKERFILE.read_text(), re.MULTILINE)
    assert copied == ["dist", "deploy/torch-memory-saver"]
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
