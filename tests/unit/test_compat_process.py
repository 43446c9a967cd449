"""torch_memory_saver's API in child processes: installation, environment variables, the preload library.

On the host driver, with tests/native/fake_cudart.cpp in place of the CUDA runtime.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from memsaver_core.compat.torch_memory_saver.utils import get_binary_path_from_package
from tests import forks
from tests.native import injection
from tests.programs import output_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the host driver's regions")

ROOT = Path(__file__).parents[2]
PRELOAD = str(get_binary_path_from_package("torch_memory_saver_hook_mode_preload"))

SETTINGS = {"MEMSAVER_DRIVER": "host", "MEMSAVER_HOST_CAPACITY": "1GiB"}

INSTALL = """
import memsaver_core.compat
memsaver_core.compat.install()
"""

#: Loads the native module whose drivers fail on request.
FAULTY = """
import os
from tests.native.site import sitecustomize
sitecustomize.install(os.environ[sitecustomize.VARIABLE])
"""

# cudaMalloc and the others as a C program would call them: by the global scope.
RAW_CUDA = """
import ctypes, os
runtime = ctypes.CDLL(os.environ["FAKE_CUDART"], mode=ctypes.RTLD_GLOBAL)
api = ctypes.CDLL(None)
for name in ("cudaFree", "cudaFreeAsync"):
    api[name]

def malloc(size):
    pointer = ctypes.c_void_p()
    code = api.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size))
    assert code == 0, code
    return pointer

def fill(pointer, size, value):
    ctypes.memset(pointer, value, size)

def content(pointer, size):
    return ctypes.string_at(pointer, size)
"""


@pytest.fixture(scope="module")
def cudart(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    library = tmp_path_factory.mktemp("cudart") / "libcudart.so.12"
    source = ROOT / "tests/native/fake_cudart.cpp"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return str(library)


def run(code: str, *arguments: str, **environment: str) -> str:
    return output_of(code, *arguments, **{**SETTINGS, **environment})


def test_install_answers_the_import() -> None:
    run(
        INSTALL
        + """
import importlib.util, os
memsaver_core.compat.install()
assert importlib.util.find_spec("torch_memory_saver") is not None
import torch_memory_saver
from torch_memory_saver import TorchMemorySaver, configure_subprocess, torch_memory_saver as saver
from torch_memory_saver.entrypoint import _TorchMemorySaverImpl
from torch_memory_saver.binary_wrapper import BinaryWrapper
from torch_memory_saver.hooks.base import HookUtilBase
from torch_memory_saver.hooks.mode_preload import HookUtilModePreload, configure_subprocess as same
from torch_memory_saver.hooks.mode_torch import HookUtilModeTorch
from torch_memory_saver.testing_utils import get_and_print_gpu_memory
from torch_memory_saver.utils import change_env, get_binary_path_from_package
import torch_memory_saver.utils
assert configure_subprocess is same
assert isinstance(saver, TorchMemorySaver) and saver is torch_memory_saver.torch_memory_saver
assert saver._impl is None
saver.hook_mode = "torch"
import torch
with saver.region(enable_cpu_backup=True):
    tensor = torch.full((1000,), 42.0)
saver.pause()
saver.resume()
assert tensor[0] == 42
assert isinstance(saver._impl, _TorchMemorySaverImpl)
assert isinstance(saver._impl._hook_util, HookUtilModeTorch)
"""
    )


@pytest.mark.parametrize("mode", ["preload", "torch"])
def test_script_that_knows_nothing_of_memsaver(mode: str) -> None:
    """The script of torch_memory_saver's README runs unchanged after install()."""
    script = str(ROOT / "tests/data/torch_memory_saver_script.py")
    code = INSTALL + "import runpy, sys; sys.argv.pop(0); runpy.run_path(sys.argv[0])"
    assert run(code, script, mode, str(32 << 20)).endswith("done\n")


def test_library_lies_beside_the_package() -> None:
    """Projects that predate ``get_binary_path_from_package`` look there."""
    run(
        INSTALL
        + """
import torch_memory_saver, os
from torch_memory_saver.utils import get_binary_path_from_package
found = get_binary_path_from_package("torch_memory_saver_hook_mode_preload")
assert "torch_memory_saver" in found.name
for suffix in ("", "_cu12", "_cu13"):
    assert (found.parent / f"torch_memory_saver_hook_mode_preload{suffix}.abi3.so").exists()
"""
    )


def test_install_after_another_one_was_imported(tmp_path: Path) -> None:
    (tmp_path / "torch_memory_saver.py").write_text("")
    run(
        """
import torch_memory_saver, memsaver_core.compat
try:
    memsaver_core.compat.install()
except ValueError as error:
    assert "imported already" in str(error), error
else:
    raise SystemExit("no error")
""",
        PYTHONPATH=str(tmp_path),
    )


def test_subprocesses_too_when_asked(tmp_path: Path) -> None:
    child = "import torch_memory_saver as t; print(t.TorchMemorySaver.__module__)"
    code = f"""
import subprocess, sys, memsaver_core.compat
memsaver_core.compat.install(subprocesses=len(sys.argv) > 1)
memsaver_core.compat.install(subprocesses=len(sys.argv) > 1)
ran = subprocess.run([sys.executable, "-c", {child!r}], capture_output=True, text=True)
print(ran.returncode, ran.stdout.strip())
"""
    (tmp_path / "torch_memory_saver.py").write_text("raise SystemExit(3)")  # one that is installed
    assert run(code, PYTHONPATH=str(tmp_path)).split() == ["3"]
    asked = run(code, "asked", PYTHONPATH=str(tmp_path)).split()
    assert asked == ["0", "memsaver_core.compat.torch_memory_saver.entrypoint"]


def test_distribution_provides_the_module() -> None:
    run(
        """
import torch_memory_saver
import torch_memory_saver.utils
from torch_memory_saver import torch_memory_saver as saver
assert torch_memory_saver.__name__ == "memsaver_core.compat.torch_memory_saver"
assert saver.enabled
import memsaver_core.compat
memsaver_core.compat.install()
""",
        PYTHONPATH=str(ROOT / "deploy" / "torch-memory-saver"),
    )


def test_environment_variables(tmp_path: Path) -> None:
    run(
        INSTALL
        + """
import os, torch
from torch_memory_saver import torch_memory_saver as saver
assert saver.retain_cpu_backup is True
assert os.path.isdir(os.environ["TMS_DISK_BACKUP_DIR"])
cdll = saver._impl._binary_wrapper.cdll
assert cdll.tms_get_interesting_region() and cdll.tms_get_enable_disk_backup()
assert cdll.tms_get_cpu_backup_backend() == b"mmap"
with saver.region(enable_disk_backup=True):
    tensor = torch.randn(1000)
expected = tensor.clone()
saver.pause()
fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
files = [os.readlink(fd) for fd in fds if os.path.lexists(fd)]
assert any(name.startswith(os.environ["TMS_DISK_BACKUP_DIR"]) for name in files), files
saver.resume()
assert torch.equal(tensor, expected)
""",
        TMS_INIT_ENABLE="1",
        TMS_INIT_ENABLE_DISK_BACKUP="yes",
        TMS_INIT_CPU_BACKUP_BACKEND="mmap",
        TMS_RETAIN_CPU_BACKUP="true",
        TMS_DISK_BACKUP_DIR=str(tmp_path / "backups"),
        TMS_DISK_BACKUP_CHUNK_MB="64",
    )


def test_disabled() -> None:
    run(
        INSTALL
        + """
import torch
from torch_memory_saver import torch_memory_saver as saver
saver.memory_margin_bytes = 1
saver.set_disk_backup_dir("/tmp")
with saver.region(enable_cpu_backup=True):
    tensor = torch.ones(10)
    with saver.disable():
        torch.ones(10)
saver.pause()
assert tensor.sum() == 10
assert saver.get_cpu_backup(tensor) is None
saver.resume()
""",
        MEMSAVER_ENABLED="0",
    )


@pytest.mark.parametrize(("retain", "plenty"), [("0", False), ("0", True), ("1", False)])
@pytest.mark.guards("host memory stayed resident after a resume, or freeing it slowed the resume")
def test_resident_memory_after_a_resume(retain: str, plenty: bool) -> None:
    """Without retention the host memory of backups is returned to the kernel if the host lacks memory, and kept for the
    next pause if it has plenty; with retention it stays."""
    run(
        INSTALL
        + """
import os, time, torch
import memsaver_core as ms
from memsaver_core.compat.torch_memory_saver import state
from torch_memory_saver import torch_memory_saver as saver

def rss():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

plenty, asked = os.environ["PLENTY"] == "True", []
state.is_plentiful = lambda spare: asked.append(spare) or plenty
with saver.region(enable_cpu_backup=True):
    tensor = torch.randint(-1 << 63, (1 << 63) - 1, (24 << 20,))
expected = tensor.clone()
before = rss()
saver.pause()
saver.resume()
kept = plenty or os.environ["TMS_RETAIN_CPU_BACKUP"] == "1"
deadline = time.monotonic() + 600
while rss() > before + 32 if not kept else plenty and len(asked) < 2:
    assert time.monotonic() < deadline, (before, rss())
    time.sleep(0.01)
assert (rss() > before + 160) == kept, (before, rss())
backup = ms.status().host_backup
assert (backup.unused_bytes >= 192 << 20) == plenty
assert torch.equal(tensor, expected)
if plenty:  # until the host lacks memory
    plenty = False
    while ms.status().host_backup.unused_bytes:
        assert time.monotonic() < deadline
        time.sleep(0.01)
""",
        TMS_RETAIN_CPU_BACKUP=retain,
        PLENTY=str(plenty),
        MEMSAVER_PREPARE_BACKUP="0",
    )


@pytest.mark.parametrize("kind", ["", "pinned", "mmap"])
def test_host_memory_for_the_first_pause(kind: str) -> None:
    """It is pinned from the end of the region on, in the background, until the host lacks memory."""
    run(
        INSTALL
        + """
import os, time, torch
import memsaver_core as ms
from memsaver_core.compat.torch_memory_saver import state
from torch_memory_saver import torch_memory_saver as saver

def wait_until(condition):
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)

plenty = True
state.is_plentiful = lambda spare: plenty
backup = lambda: ms.status().host_backup
with saver.region("discarded"):
    other = torch.ones(1000)
assert not backup().target_bytes
with saver.region("kept", enable_cpu_backup=True, cpu_backup_backend=os.environ["KIND"] or None):
    tensor = torch.randint(-1 << 63, (1 << 63) - 1, (24 << 20,))
if os.environ["KIND"] == "mmap":
    assert not backup().target_bytes
else:
    wait_until(lambda: backup().unused_bytes >= tensor.nbytes)
    plenty = False
    wait_until(lambda: not backup().unused_bytes)
expected = tensor.clone()
saver.pause()
saver.resume()
assert torch.equal(tensor, expected)
""",
        KIND=kind,
    )


@pytest.mark.parametrize("how", ["no thread", "no answer"])
def test_host_memory_that_nothing_watches_over(how: str) -> None:
    """It is unpinned; the next resume tries again."""
    run(
        INSTALL
        + """
import os, threading, time, torch
import memsaver_core as ms
from memsaver_core.compat.torch_memory_saver import state
from torch_memory_saver import torch_memory_saver as saver

def fails(*arguments):
    raise RuntimeError("it cannot be done")

def wait_until(condition):
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)

unused = lambda: ms.status().host_backup.unused_bytes
asked = []
owner, name = (threading.Thread, "start") if os.environ["HOW"] == "no thread" else (state, "is_plentiful")
state.is_plentiful = lambda spare: asked.append(spare) or True
works = getattr(owner, name)
with saver.region(enable_cpu_backup=True):
    tensor = torch.ones(1000)
setattr(owner, name, fails)
saver.pause()
assert ms.status().host_backup.capacity_bytes
saver.resume()
wait_until(lambda: not unused())
setattr(owner, name, works)
saver.pause()
saver.resume()
wait_until(lambda: len(asked) >= 2)
assert unused()
""",
        HOW=how,
        MEMSAVER_PREPARE_BACKUP="0",
    )


def test_a_process_that_ends_just_after_a_resume() -> None:
    """While a thread of memsaver's asks the native core how much memory is unused."""
    run(
        INSTALL
        + """
import torch
from torch_memory_saver import torch_memory_saver as saver
with saver.region(enable_cpu_backup=True):
    tensor = torch.ones(1000)
saver.pause()
saver.resume()
""",
        TESTS_END_WHOLE="1",
    )


@pytest.mark.parametrize("how", ["environment", "region"])
@pytest.mark.guards("host memory stayed resident after a resume, or freeing it slowed the resume")
def test_resident_memory_at_the_return_of_a_resume(how: str) -> None:
    """``mmap`` is asked for by those who look at the process's memory as soon as ``resume`` returns."""
    run(
        INSTALL
        + """
import os, torch
from torch_memory_saver import torch_memory_saver as saver

def rss():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

backend = None if "TMS_INIT_CPU_BACKUP_BACKEND" in os.environ else "mmap"
with saver.region(enable_cpu_backup=True, cpu_backup_backend=backend):
    tensor = torch.randint(-1 << 63, (1 << 63) - 1, (24 << 20,))
expected = tensor.clone()
before = rss()
for _ in range(2):
    saver.pause()
    saver.resume()
    assert rss() < before + 32, (before, rss())
assert torch.equal(tensor, expected)
""",
        **({"TMS_INIT_CPU_BACKUP_BACKEND": "mmap"} if how == "environment" else {}),
    )


@pytest.fixture(scope="module")
def preloaded(cudart: str) -> Callable[..., None]:
    """Runs programs as forks of a process that was started with the library, and has loaded torch."""
    environment = {**os.environ, **SETTINGS, "LD_PRELOAD": PRELOAD, "OMP_NUM_THREADS": "1", "FAKE_CUDART": cudart}
    server = forks.started("torch._dynamo", LD_PRELOAD=PRELOAD)

    def run(code: str, **changes: str) -> None:
        command = [sys.executable, "-c", RAW_CUDA + code]
        ran = forks.run(command, server=server, env={**environment, **changes}, capture_output=True, text=True)
        assert ran.returncode == 0, f"exit {ran.returncode}\n{ran.stdout}\n{ran.stderr}"

    return run


def test_raw_allocation_of_an_odd_size(preloaded: Callable[..., None]) -> None:
    """With TMS_INIT_ENABLE: 6,912 bytes from cudaMalloc, paused and resumed from C, freed by cudaFree."""
    preloaded(
        INSTALL
        + """
import memsaver_core as ms, torch_memory_saver
pointer = malloc(6912)
assert runtime.fake_mallocs() == 0
fill(pointer, 6912, 7)
assert api.tms_pause(None) == 0
(tag,) = ms.status().tags
assert (tag.tag, tag.restore, tag.state) == ("default", "host", "released")
assert api.tms_resume(b"default") == 0
assert api.tms_pause(b"unknown") == 0
assert content(pointer, 6912) == bytes([7]) * 6912
assert api.cudaFree(pointer) == 0
assert runtime.fake_frees() == 0
assert ms.status().tags[0].bytes == 0
assert api.cudaFree(None) == 0 and runtime.fake_frees() == 1
""",
        TMS_INIT_ENABLE="1",
        TMS_INIT_ENABLE_CPU_BACKUP="1",
    )


def test_functions_of_the_runtime_by_the_private_library(preloaded: Callable[..., None]) -> None:
    """As by a library that is linked with the runtime; inside a region they are memsaver's."""
    preloaded(
        INSTALL
        + """
from torch_memory_saver import torch_memory_saver as saver
import memsaver_core as ms
cdll = saver._ensure_initialized()._binary_wrapper.cdll
pointer = ctypes.c_void_p()
with saver.region("raw"):
    assert cdll.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(1 << 20)) == 0
assert [tag.bytes for tag in ms.status().tags if tag.tag == "raw"] == [1 << 20]
assert cdll.cudaFree(pointer) == 0
assert not hasattr(cdll, "cudaNoSuchFunction")
""",
    )


def test_raw_allocations_follow_the_region_of_their_thread(preloaded: Callable[..., None]) -> None:
    preloaded(
        INSTALL
        + """
import threading
import memsaver_core as ms
from torch_memory_saver import torch_memory_saver as saver
outside = malloc(100)
assert runtime.fake_mallocs() == 1
assert api.cudaFree(outside) == 0 and runtime.fake_frees() == 1
stream = ctypes.c_void_p(1)
with saver.region("workspace"):
    with saver.region("weights", enable_cpu_backup=True):
        kept = malloc(100)
        thread = threading.Thread(target=malloc, args=(100,))
        thread.start()
        thread.join()
        assert runtime.fake_mallocs() == 2
        with saver.disable():
            malloc(100)
        assert runtime.fake_mallocs() == 3
        saver._impl._binary_wrapper.cdll.tms_set_interesting_region(False)
        malloc(100)
        saver._impl._binary_wrapper.cdll.tms_set_interesting_region(True)
        assert runtime.fake_mallocs() == 4
    later = ctypes.c_void_p()
    assert api.cudaMallocAsync(ctypes.byref(later), ctypes.c_size_t(100), stream) == 0
    runtime.fake_set_capturing(True)
    captured = ctypes.c_void_p()
    assert api.cudaMallocAsync(ctypes.byref(captured), ctypes.c_size_t(100), stream) == 0
    runtime.fake_set_capturing(False)
    assert runtime.fake_mallocs() == 5
    assert api.cudaFreeAsync(captured, stream) == 0 and runtime.fake_frees() == 2
fill(kept, 100, 9)
fill(later, 100, 9)
assert {tag.tag: tag.restore for tag in ms.status().tags} == {"weights": "host", "workspace": "zero"}
saver.pause()
saver.resume()
assert content(kept, 100) == bytes([9]) * 100
assert content(later, 100) == bytes(100)
assert api.cudaFreeAsync(later, stream) == 0
saver.pause("weights")
assert api.cudaFree(kept) == 0 and runtime.fake_frees() == 2  # freed while paused
assert all(tag.bytes == 0 for tag in ms.status().tags), ms.status()
""",
    )


def test_nested_regions_under_init_enable(preloaded: Callable[..., None]) -> None:
    preloaded(
        INSTALL
        + """
import torch
from torch_memory_saver import torch_memory_saver as saver
cdll = saver._ensure_initialized()._binary_wrapper.cdll
def state():
    return cdll.tms_get_interesting_region(), cdll.tms_get_enable_cpu_backup(), cdll.tms_get_current_tag()
assert state() == (True, True, b"default")
weights = malloc(5000)
with saver.region(tag="grad_buffer", enable_cpu_backup=False):
    assert state() == (True, False, b"grad_buffer")
    gradients = malloc(5000)
assert state() == (True, True, b"default")
assert api.tms_get_interesting_region()  # one account, for C and Python
fill(weights, 5000, 1)
fill(gradients, 5000, 2)
saver.pause()
with saver.disable():
    malloc(10)
assert runtime.fake_mallocs() == 1
saver.resume()
assert content(weights, 5000) == bytes([1]) * 5000
assert content(gradients, 5000) != bytes([2]) * 5000
""",
        TMS_INIT_ENABLE="1",
        TMS_INIT_ENABLE_CPU_BACKUP="1",
    )


@pytest.mark.guards("running out of memory inside the allocator killed the process")
def test_raw_allocation_out_of_memory(preloaded: Callable[..., None]) -> None:
    """cudaErrorMemoryAllocation is returned, so that torch frees its caches and retries."""
    preloaded(
        INSTALL
        + """
import torch_memory_saver
pointer = ctypes.c_void_p()
assert api.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(2 << 30)) == 2
malloc(1000)
""",
        TMS_INIT_ENABLE="1",
    )


def test_without_memsaver_the_library_changes_nothing(preloaded: Callable[..., None]) -> None:
    preloaded("assert api.cudaFree(malloc(10)) == 0 and runtime.fake_frees() == 1", TMS_INIT_ENABLE="1")


def test_failure_of_an_operation_called_from_c(preloaded: Callable[..., None]) -> None:
    preloaded(
        FAULTY
        + INSTALL
        + """
import torch_memory_saver
malloc(1000)
from memsaver_core import process
process.saver().fail("unmap", 1)
assert api.tms_pause(None) == 1
process.saver().heal()
assert api.tms_pause(None) == 0
assert api.tms_resume(None) == 0
""",
        TMS_INIT_ENABLE="1",
        **injection.in_child(),
    )


@pytest.mark.parametrize("inherit", ["0", "1"])
def test_grandchildren_inherit_on_request_only(inherit: str) -> None:
    """The child of configure_subprocess() has the library; its own children have it only if asked."""
    run(
        INSTALL
        + """
import os, subprocess, sys
from torch_memory_saver import configure_subprocess
LOADED = "print(sum('torch_memory_saver_hook_mode_preload' in line for line in open('/proc/self/maps')) > 0)"
CHILD = (
    "import os, subprocess, sys, memsaver_core.compat; memsaver_core.compat.install(); import torch_memory_saver;"
    + LOADED
    + f"; print(subprocess.run([sys.executable, '-c', {LOADED!r}], capture_output=True, text=True).stdout)"
)
with configure_subprocess(), configure_subprocess():
    assert os.environ["LD_PRELOAD"].count("torch_memory_saver") == 1
    out = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True)
assert "LD_PRELOAD" not in os.environ
assert out.stdout.split() == ["True", str(os.environ["MEMSAVER_PRELOAD_INHERIT"] == "1")], out
""",
        MEMSAVER_PRELOAD_INHERIT=inherit,
    )


def test_library_asks_for_nothing_and_exports_c_alone() -> None:
    nm, readelf = shutil.which("nm"), shutil.which("readelf")
    if nm is None or readelf is None:
        pytest.skip("no binutils")
    listed = subprocess.run([nm, "-D", "--defined-only", PRELOAD], capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1] for line in listed.splitlines()}
    assert {name for name in names if not name.startswith(("tms_", "memsaver_"))} == {
        "cudaMalloc", "cudaFree", "cudaMallocAsync", "cudaFreeAsync",
    }  # fmt: skip
    dynamic = subprocess.run([readelf, "-d", PRELOAD], capture_output=True, text=True, check=True).stdout
    needed = [line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "NEEDED" in line]
    assert all(name.startswith(("libc.so", "ld-linux", "libdl.so")) for name in needed), needed
