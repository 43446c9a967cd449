"""Regions on the host driver: memory of unmodified torch code can be released."""

from __future__ import annotations

import gc
import threading
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import memsaver_core as ms
from memsaver_core import process
from tests.dirty_pages import dirty_pages
from tests.programs import run_python

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the host driver's regions")


@pytest.fixture
def tag() -> str:
    return f"t-{uuid.uuid4().hex[:8]}"


def owned(tensor: torch.Tensor) -> bool:
    return process.saver().owns(tensor.untyped_storage().data_ptr())


def bytes_of(tag: str) -> int:
    return sum(each.bytes for each in ms.status().tags if each.tag == tag)


def test_module_built_inside(tag: str) -> None:
    with ms.region(tag, restore="host"):
        model = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
    inputs = torch.randn(2, 5, 64)
    model.eval()
    expected = model(inputs)
    addresses = [each.data_ptr() for each in model.parameters()]
    assert all(owned(each) for each in model.parameters())
    ms.release([tag])
    ms.resume([tag])
    assert addresses == [each.data_ptr() for each in model.parameters()]
    assert torch.equal(model(inputs), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_from_pretrained(tag: str, tmp_path: Path, dtype: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2Config(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    with ms.region(tag, restore="host"):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    assert all(owned(each) for each in [*model.parameters(), *model.buffers()])
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()  # still tied
    ids = torch.arange(8)[None]
    with torch.no_grad():
        expected = model(ids).logits
        ms.release([tag])
        ms.resume([tag])
        assert torch.equal(model(ids).logits, expected)


def test_data_literals_and_copies(tag: str) -> None:
    with ms.region(tag, restore="host"):
        literal = torch.tensor([1.0, 2.0, 3.0])
        cloned = torch.ones(5).clone()
        stacked = torch.stack([literal, literal])
        halves = stacked.chunk(2)
    assert all(owned(each) for each in (literal, cloned, stacked, *halves))
    assert halves[0].untyped_storage().data_ptr() == stacked.untyped_storage().data_ptr()
    ms.release([tag])
    ms.resume([tag])
    assert literal.tolist() == [1, 2, 3]
    assert stacked.tolist() == [[1, 2, 3]] * 2


def test_memory_ends_with_its_tensor(tag: str) -> None:
    with ms.region(tag):
        tensor = torch.zeros(10_000)
        view = tensor[3:]
    del tensor
    gc.collect()
    assert bytes_of(tag) == 40_960
    del view
    gc.collect()
    assert bytes_of(tag) == 0


@pytest.mark.guards("running out of memory inside the allocator killed the process")
def test_out_of_memory() -> None:
    """It is an error, and the process goes on."""
    result = run(
        """
        import torch, memsaver_core as ms
        with ms.region("kv_cache"):
            small = torch.ones(1000)
            try:
                torch.zeros(100 << 20)
            except ms.OutOfDeviceMemoryError as error:
                print("refused", error.needed_bytes)
            again = torch.ones(1000)
        ms.release(); ms.resume()
        print(ms.status().tags[0].bytes)
        """,
        MEMSAVER_HOST_CAPACITY="64MiB",
    )
    assert result == ["refused 419430400", "8192"]


def test_threads_have_regions_of_their_own(tag: str) -> None:
    inside, done = threading.Event(), threading.Event()
    other: dict[str, torch.Tensor] = {}

    def work() -> None:
        inside.wait()
        other["plain"] = torch.zeros(1000)
        with ms.region(tag + "-other"):
            other["tagged"] = torch.zeros(1000)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    with ms.region(tag):
        inside.set()
        done.wait()
    thread.join()
    assert not owned(other["plain"])
    assert owned(other["tagged"])
    assert bytes_of(tag) == 0


def test_adopt_keeps_sharing(tag: str) -> None:
    module = torch.nn.Linear(16, 16)
    module.register_buffer("view", module.weight.detach()[:4])
    expected = module.weight.detach().clone()
    assert ms.adopt(module, tag, restore="host") is module
    assert owned(module.weight)
    assert module.view.data_ptr() == module.weight.data_ptr()
    ms.release([tag])
    ms.resume([tag])
    assert torch.equal(module.weight, expected)
    module(torch.ones(1, 16)).sum().backward()  # autograd still knows the parameter
    assert module.weight.grad is not None


def test_one_line_brings_a_buffer_in(tag: str) -> None:
    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.workspace = torch.zeros(1 << 16)

    attention = Attention()
    ms.adopt(attention.workspace, tag)
    assert owned(attention.workspace)
    ms.release([tag])
    ms.resume([tag])
    attention.workspace.fill_(1)


@pytest.mark.guards("undefined KV cache pages produced NaN")
def test_pages_of_zero_are_really_zero() -> None:
    """`kv_cache` comes back as zeros by default, so old page content cannot produce NaN."""
    with ms.region("kv_cache"):
        cache = torch.ones(1000)
    with dirty_pages(cache.data_ptr(), bytes_of("kv_cache")):
        ms.release(["kv_cache"], restore={"kv_cache": "discard"})
        ms.resume(["kv_cache"])
    assert cache.isnan().all()  # shows that the new pages hold garbage
    with dirty_pages(cache.data_ptr(), bytes_of("kv_cache")):
        ms.release(["kv_cache"])
        ms.resume(["kv_cache"])
    assert not cache.any()


@pytest.mark.guards("replaying a graph failed after its memory was discarded", "releasing a graph freed nothing")
def test_a_graphs_memory_goes_and_keeps_what_capture_wrote(tag: str) -> None:
    """Its pages are freed, as measured, and content that only the capture wrote is back on the new pages."""
    with ms.region("cuda_graph"):
        written_at_capture = torch.arange(1 << 18, dtype=torch.int64)
    address, expected = written_at_capture.data_ptr(), written_at_capture.clone()
    with dirty_pages(address, bytes_of("cuda_graph")):
        report = ms.release(["cuda_graph"])
        assert report.tags[0].restore == "host"
        assert report.devices[0].delta_bytes == -report.released_bytes <= -(2 << 20)
        ms.resume(["cuda_graph"])
    assert written_at_capture.data_ptr() == address
    assert torch.equal(written_at_capture, expected)


@pytest.mark.filterwarnings("ignore:.*_set_allocator_settings is deprecated:FutureWarning")
@pytest.mark.parametrize("where", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "at run time"])
@pytest.mark.guards("expandable segments made a release free nothing")
def test_whatever_torch_was_told_of_expandable_segments(where: str, tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The region's memory is freed, as measured."""
    if where == "at run time":
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    else:
        monkeypatch.setenv(where, "expandable_segments:True")
    try:
        with ms.region(tag, restore="host"):
            tensor = torch.ones(1 << 20)
        assert ms.release([tag]).devices[0].delta_bytes == -(4 << 20)
        ms.resume([tag])
        assert bool((tensor == 1).all())
    finally:
        if where == "at run time":
            torch.cuda.memory._set_allocator_settings("expandable_segments:False")


def test_unknown_and_well_known_tags(tag: str) -> None:
    with pytest.raises(ms.UnknownTagError) as caught:
        ms.release([tag])
    assert caught.value.unknown == [tag]
    assert {"weights", "kv_cache", "cuda_graph", "workspace"} <= set(caught.value.known)
    report = ms.resume(["cuda_graph"]).tags[0]
    assert (report.tag, report.bytes, report.already) == ("cuda_graph", 0, True)


@pytest.mark.guards("memory was reported free before it was free")
def test_report_is_measured(tag: str) -> None:
    """Every phase carries the device's own count before and after it."""
    with ms.region(tag, restore="host"):
        tensor = torch.ones(1 << 20)
    report = ms.release([tag])
    assert [phase.name for phase in report.phases] == ["synchronize", "pause", "empty_cache", "ipc_collect", "settle"]
    pause = report.phases[1]
    assert pause.devices[0].delta_bytes == -(4 << 20)
    assert report.devices[0].delta_bytes == -report.released_bytes == -(4 << 20)
    assert report.tags[0].backed_up_bytes == 4 << 20
    back = ms.resume([tag])
    assert back.devices[0].delta_bytes == back.resumed_bytes == 4 << 20
    assert bool((tensor == 1).all())


@pytest.mark.parametrize("lazy", [torch.Tensor.conj, lambda tensor: tensor.conj().imag], ids=["conjugate", "negative"])
def test_adopt_refuses_what_a_move_would_change(lazy: Callable[[torch.Tensor], torch.Tensor], tag: str) -> None:
    tensor = lazy(torch.randn(8, dtype=torch.complex64))
    expected = tensor.clone()
    with pytest.raises(ms.ConfigurationError, match="resolve_"):
        ms.adopt(tensor, tag)
    assert torch.equal(tensor, expected)


def test_disabled_is_a_no_op() -> None:
    result = run(
        """
        import torch, memsaver_core as ms
        with ms.region("weights"):
            model = torch.nn.Linear(4, 4)
        ms.adopt(model, "weights")
        report = ms.release(["any", "tags"])
        print(report.enabled, report.released_bytes, ms.resume().enabled, ms.status().enabled, ms.driver_name())
        print(model(torch.ones(4)).shape[0], ms.read_devices())
        """,
        MEMSAVER_ENABLED="0",
    )
    assert result == ["False 0 False False none", "4 ()"]


def test_settings_that_cannot_be_used() -> None:
    result = run(
        """
        import memsaver_core as ms
        try:
            ms.status()
        except ms.ConfigurationError as error:
            print("MEMSAVER_RETENTION is 'forever'" in str(error))
        """,
        MEMSAVER_RETENTION="forever",
    )
    assert result == ["True"]


def run(code: str, **environment: str) -> list[str]:
    result = run_python(code, **environment)
    assert result.returncode == 0, result.stderr
    assert "memsaver: warning" not in result.stderr
    return result.stdout.strip().splitlines()


def test_a_tag_that_no_answer_can_carry_is_refused() -> None:
    with pytest.raises(ms.ConfigurationError, match="unpaired surrogate"):
        ms.region("weights\ud800")
