"""Attaching a module: what is moved into regions, how its calls pass the gate, and what is refused."""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import io
import logging
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import memsaver_core as ms
from memsaver_core import adopting, process
from memsaver_server.engine import AdmissionClosedError, DrainTimeoutError, Engine, GeneratingEngine
from memsaver_server.integrations.module import ModuleEngine
from memsaver_server.integrations.module.engine import tensors_of
from tests.programs import output_of
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on the host driver")


@pytest.fixture
def engine_of() -> Iterator[Callable[..., ModuleEngine]]:
    engines: list[ModuleEngine] = []

    def make(*modules: nn.Module, **options: Any) -> ModuleEngine:
        engines.append(ModuleEngine(*modules, **options))
        return engines[-1]

    yield make
    ms.resume()
    for engine in engines:
        engine.close()


def owned(tensor: Tensor) -> bool:
    return process.saver().owns(tensor.untyped_storage().data_ptr())


# What is moved, and under which tag.


class Assorted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.tied = nn.Linear(16, 16)
        self.tied.weight = self.first.weight
        self.register_buffer("statistics", torch.ones(16))
        self.register_buffer("table", torch.rand(16) + 1, persistent=False)
        self.register_buffer("rows", self.first.weight.detach()[2:4], persistent=False)
        self.register_buffer("turned", torch.rand(16, 8).t(), persistent=False)
        self.register_buffer("spread", torch.ones(1).expand(16), persistent=False)
        self.register_buffer("scratch", torch.ones(16))
        self.cached = {"pages": [torch.ones(16), (torch.ones(16), None)], "count": 3}

    def forward(self, x: Tensor) -> Tensor:
        x = self.tied(self.first(x)) + self.statistics + self.table + self.rows.sum() + self.turned.sum() + self.spread
        return x + self.scratch * 0 + self.cached["pages"][0]


def test_every_tensor_stays_the_object_that_it_was_and_moves_once(engine_of: Callable[..., ModuleEngine]) -> None:
    module = Assorted()
    held = {each.name: each.tensor for each in tensors_of([module])}
    assert {"tied.weight", "statistics", "cached.pages.0", "cached.pages.1.0"} <= set(held)
    content = {name: tensor.clone() for name, tensor in held.items()}
    layout = {name: (tensor.stride(), tensor.storage_offset()) for name, tensor in held.items()}
    x = torch.randn(2, 16)
    expected = module(x)
    engine_of(module, workspaces=["scratch", "cached.*"])
    assert {each.name: each.tensor for each in tensors_of([module])}.items() == held.items()
    for name, tensor in held.items():
        assert owned(tensor), name
        assert torch.equal(tensor, content[name]), name
        assert (tensor.stride(), tensor.storage_offset()) == layout[name], name
    assert module.tied.weight is module.first.weight
    assert module.rows.data_ptr() == module.first.weight[2:4].data_ptr()
    assert torch.equal(module(x), expected)
    module(x).sum().backward()
    assert module.first.weight.grad is not None


def test_tags_go_by_what_can_bring_the_content_back(engine_of: Callable[..., ModuleEngine]) -> None:
    module = Assorted()
    engine_of(module, workspaces=["scratch", "cached.*"])
    by_tag = {
        "weights": [module.first.weight, module.first.bias, module.statistics, module.rows],
        "buffers": [module.table, module.turned, module.spread],
        "workspace": [module.scratch, module.cached["pages"][0]],
    }
    everything = [tensor for members in by_tag.values() for tensor in members]
    for tag, members in by_tag.items():
        for tensor in everything:
            torch.empty(0).set_(tensor.untyped_storage()).fill_(1)
        ms.release([tag], restore={tag: "zero"})
        ms.resume([tag])
        for tensor in everything:
            went = any(tensor is each for each in members)
            assert bool((tensor == (0 if went else 1)).all()), (tag, tensor.shape)
        module.scratch.fill_(1)
    ms.release()
    ms.resume()
    assert not module.scratch.any()  # the default of workspaces
    assert module.table.all()


def test_the_policy_of_workspaces_can_be_chosen(engine_of: Callable[..., ModuleEngine]) -> None:
    module = Assorted()
    engine_of(module, workspaces="scratch", workspace_restore="host")
    ms.release()
    ms.resume()
    assert module.scratch.all()


def test_a_workspace_that_shares_memory_with_a_weight_is_kept_as_one(engine_of: Callable[..., ModuleEngine]) -> None:
    module = Assorted()
    expected = module.rows.clone()
    engine_of(module, workspaces="rows")
    ms.release()
    ms.resume()
    assert torch.equal(module.rows, expected)


def test_what_others_keep_of_the_memory_moves_along(engine_of: Callable[..., ModuleEngine]) -> None:
    """A state dict held elsewhere would keep the old memory and no longer be the module's."""
    module = nn.Linear(16, 16)
    state = module.state_dict()
    flat = torch.zeros(8)
    module.register_buffer("part", flat[:4])
    engine_of(module)
    assert state["weight"].data_ptr() == module.weight.data_ptr()
    flat.fill_(3)
    assert module.part.tolist() == [3, 3, 3, 3]


def test_what_is_in_a_region_already_stays_there(engine_of: Callable[..., ModuleEngine]) -> None:
    with ms.region("weights"):
        first = nn.Linear(16, 16)
    module = nn.Sequential(first, nn.Linear(16, 16))
    where = first.weight.data_ptr()
    engine_of(module)
    assert first.weight.data_ptr() == where
    assert owned(module[1].weight)


def test_much_moves_in_batches(engine_of: Callable[..., ModuleEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adopting, "BATCH_BYTES", 3000)
    module = nn.Sequential(*(nn.Linear(16, 16) for _ in range(9)))
    x = torch.randn(2, 16)
    expected = module(x)
    engine_of(module)
    assert all(owned(each) for each in module.parameters())
    assert torch.equal(module(x), expected)


def test_subclasses_move_by_the_tensors_that_they_wrap_or_stay(
    engine_of: Callable[..., ModuleEngine], caplog: pytest.LogCaptureFixture
) -> None:
    class Named(Tensor):
        pass

    module = nn.Module()
    module.pair = TwoTensor(torch.ones(16), torch.ones(16))
    module.odd = torch.ones(16).as_subclass(Named)
    module.conjugate = torch.randn(16, dtype=torch.complex64).conj()
    content = module.conjugate.clone()
    with caplog.at_level(logging.WARNING, "memsaver"):
        engine_of(module)
        # Not an error: they may have been allocated in a region. If a service has run in this process, a thread logs.
        wait_until(lambda: "odd, conjugate are of a kind that cannot be moved" in caplog.text)
    assert owned(module.pair.a)
    assert owned(module.pair.b)
    assert torch.equal(module.conjugate, content)
    assert module.odd.sum() == 16


# Refusals, before anything has changed.


def test_meta_tensors_are_refused_by_name(engine_of: Callable[..., ModuleEngine]) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    with pytest.raises(ms.ConfigurationError, match=r"1\.weight, 1\.bias are on the meta device: load"):
        engine_of(module)
    assert not owned(module[0].weight)
    assert "forward" not in vars(module)


def test_modules_without_shapes_are_refused(engine_of: Callable[..., ModuleEngine]) -> None:
    with pytest.raises(ms.ConfigurationError, match=r"weight is not initialized yet: call the module once"):
        engine_of(nn.LazyLinear(4))


def test_patterns_that_fit_nothing_are_refused(engine_of: Callable[..., ModuleEngine]) -> None:
    for pattern in ("scrach", "first.weight"):  # a parameter is no workspace
        with pytest.raises(ms.ConfigurationError, match=rf"called '{pattern}'; there are statistics, table"):
            engine_of(Assorted(), workspaces=pattern)


def test_a_second_engine_is_refused_until_the_first_is_closed_or_gone() -> None:
    """A release takes the memory of all regions, and the second engine's gate would not know."""
    first = ModuleEngine(nn.Linear(4, 4))
    with pytest.raises(ms.ConfigurationError, match="Linear is attached in this process already"):
        ModuleEngine(nn.Linear(4, 4))
    first.close()
    second = ModuleEngine(nn.Linear(4, 4))
    del second
    gc.collect(0)
    ModuleEngine(nn.Linear(4, 4)).close()


def test_an_asynchronous_forward_is_refused(engine_of: Callable[..., ModuleEngine]) -> None:
    class Waits(nn.Module):
        async def forward(self) -> None:
            pass

    with pytest.raises(ms.ConfigurationError, match=r"Waits\.forward is asynchronous"):
        engine_of(Waits())


# Calls are requests.


class Called(nn.Module):
    """Calls a given function."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, work: Callable[[], Any]) -> Any:
        return work()


def inside(engine: ModuleEngine) -> list[str]:
    """The names of the requests in flight."""
    try:
        engine.drain(0.0)
    except DrainTimeoutError as error:
        return list(error.pending)
    return []


def test_it_is_an_engine_and_generates_nothing(engine_of: Callable[..., ModuleEngine]) -> None:
    engine = engine_of(nn.Linear(4, 4), nn.ReLU())
    assert isinstance(engine, Engine)
    assert not isinstance(engine, GeneratingEngine)
    assert engine.name == "Linear, ReLU"


def test_calls_within_a_call_belong_to_it(engine_of: Callable[..., ModuleEngine]) -> None:
    """A module that calls itself, or an attached part of it, cannot be refused in the middle of a call."""
    module = Called()
    engine = engine_of(module, module.inner)

    def work() -> list[str]:
        engine.close_admission("memory is being released")
        module(lambda: module.inner(torch.ones(4)))
        return inside(engine)

    assert module(work) == ["Called #1"]
    assert inside(engine) == []
    with pytest.raises(AdmissionClosedError, match="is being released"):
        module.inner(torch.ones(4))


def test_calls_within_a_request_belong_to_it(engine_of: Callable[..., ModuleEngine]) -> None:
    module = Called()
    engine = engine_of(module)
    with engine.request("loop") as turn:
        engine.close_admission("memory is being released")
        assert module(lambda: inside(engine)) == [turn.name] == ["loop #1"]
    assert inside(engine) == []


def test_forward_called_by_name_is_a_request_too(engine_of: Callable[..., ModuleEngine]) -> None:
    module = Called()
    engine = engine_of(module)
    assert module.forward(lambda: inside(engine)) == ["Called #1"]
    assert str(inspect.signature(module.forward)) == "(work: 'Callable[[], Any]') -> 'Any'"


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_call_that_raises_leaves_the_gate(engine_of: Callable[..., ModuleEngine], kind: type[BaseException]) -> None:
    module = Called()
    engine = engine_of(module)

    def fail() -> None:
        raise kind

    with pytest.raises(kind):
        module(fail)
    assert inside(engine) == []


def test_each_thread_has_its_own_requests(engine_of: Callable[..., ModuleEngine]) -> None:
    module = Called()
    engine = engine_of(module)
    met, leave = threading.Barrier(9), threading.Barrier(9)

    def work() -> None:
        met.wait(600)
        leave.wait(600)

    with ThreadPoolExecutor(8) as threads:
        calls = [threads.submit(module, work) for _ in range(8)]
        met.wait(600)
        assert len(inside(engine)) == 8
        leave.wait(600)
        for call in calls:
            call.result(600)
    assert inside(engine) == []


def test_a_request_spans_awaits_and_threads_of_asyncio(engine_of: Callable[..., ModuleEngine]) -> None:
    module = Called()
    engine = engine_of(module)

    async def serve() -> list[list[str]]:
        async def part() -> Any:
            return await asyncio.to_thread(module, lambda: inside(engine))

        with engine.request("served"):
            engine.close_admission("memory is being released")
            return await asyncio.gather(part(), part())

    assert asyncio.run(serve()) == [["served #1"], ["served #1"]]
    assert inside(engine) == []


def test_a_request_lasts_as_long_as_the_calls_that_belong_to_it(engine_of: Callable[..., ModuleEngine]) -> None:
    module = Called()
    engine = engine_of(module)
    entered, go_on = threading.Event(), threading.Event()

    def work() -> None:
        entered.set()
        go_on.wait(600)

    async def serve() -> Any:
        with engine.request("served"):
            task = asyncio.create_task(asyncio.to_thread(module, work))
            await asyncio.to_thread(entered.wait, 60)
        still = inside(engine)
        go_on.set()
        await task
        return still

    assert asyncio.run(serve()) == ["served #1"]
    assert inside(engine) == []


class Streams(nn.Module):
    def forward(self, engine: ModuleEngine) -> Iterator[Any]:
        try:
            given = yield inside(engine)
            yield given
        except KeyError:
            yield "caught"
        return "returned"


def test_a_generator_is_one_request_from_its_first_step_to_its_last(engine_of: Callable[..., ModuleEngine]) -> None:
    module = Streams()
    engine = engine_of(module)
    stream = module(engine)
    assert inside(engine) == []
    assert next(stream) == ["Streams #2"]
    engine.close_admission("memory is being released")
    with pytest.raises(AdmissionClosedError), engine.request():  # its consumer holds no request
        pass
    assert stream.send("sent") == "sent"
    assert stream.throw(KeyError()) == "caught"
    with pytest.raises(StopIteration, match="returned"):
        next(stream)
    assert inside(engine) == []
    engine.open_admission()
    left = module(engine)
    next(left)
    assert len(inside(engine)) == 1
    left.close()
    assert inside(engine) == []


# Compiled, copied, closed.


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


def compiled_after(module: nn.Module, attach: Callable[..., object], **options: Any) -> nn.Module:
    attach(module)
    return torch.compile(module, **options)


def compiled_before(module: nn.Module, attach: Callable[..., object], **options: Any) -> nn.Module:
    compiled = torch.compile(module, **options)
    compiled(torch.ones(2, 4))
    attach(module)
    return compiled


def compiled_is_attached(module: nn.Module, attach: Callable[..., object], **options: Any) -> nn.Module:
    compiled = torch.compile(module, **options)
    attach(compiled)
    return compiled


def compiled_in_place_after(module: nn.Module, attach: Callable[..., object], **options: Any) -> nn.Module:
    attach(module)
    module.compile(**options)
    return module


def compiled_in_place_before(module: nn.Module, attach: Callable[..., object], **options: Any) -> nn.Module:
    module.compile(**options)
    module(torch.ones(2, 4))
    attach(module)
    return module


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize(
    "how",
    [compiled_after, compiled_before, compiled_is_attached, compiled_in_place_after, compiled_in_place_before],
    ids=lambda how: how.__name__,
)
def test_compiled_calls_are_requests(
    engine_of: Callable[..., ModuleEngine], how: Callable[..., nn.Module], fullgraph: bool
) -> None:
    torch.compiler.reset()
    graphs = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    engines: list[ModuleEngine] = []
    module = Net()
    x = torch.ones(2, 4)
    expected = module(x)
    compiled = how(module, lambda each: engines.append(engine_of(each)), backend=backend, fullgraph=fullgraph)
    assert torch.equal(compiled(x), expected)
    assert graphs
    engines[0].close_admission("memory is released")
    with pytest.raises(AdmissionClosedError):
        compiled(x)
    engines[0].open_admission()
    assert torch.equal(compiled(x), expected)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_an_attached_part_of_a_compiled_module_is_gated_or_refused(
    engine_of: Callable[..., ModuleEngine], fullgraph: bool
) -> None:
    """The compiled graph breaks before an attached part, or torch reports an error if it must not. The gate is never
    compiled away."""
    torch.compiler.reset()
    module = Net()
    compiled = torch.compile(module, backend="eager", fullgraph=fullgraph)
    x = torch.ones(2, 4)
    expected = compiled(x)
    engine = engine_of(module.first)
    if fullgraph:
        with pytest.raises(torch._dynamo.exc.Unsupported):
            compiled(x)
        return
    assert torch.equal(compiled(x), expected)
    engine.close_admission("memory is released")
    with pytest.raises(AdmissionClosedError):
        compiled(x)


def test_a_module_stays_what_it_is(engine_of: Callable[..., ModuleEngine]) -> None:
    module = Assorted()
    names, shown = list(module.state_dict()), repr(module)
    engine_of(module)
    assert type(module) is Assorted
    assert (list(module.state_dict()), repr(module)) == (names, shown)
    assert not module.eval().training
    module.load_state_dict(Assorted().state_dict())
    assert owned(module.first.weight)


def copied(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module)


def pickled(module: nn.Module) -> nn.Module:
    restored: nn.Module = pickle.loads(pickle.dumps(module))
    return restored


def saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    restored: nn.Module = torch.load(file, weights_only=False)
    return restored


@pytest.mark.parametrize("own_forward", [False, True])
@pytest.mark.parametrize("how", [copied, pickled, saved], ids=lambda how: how.__name__)
def test_a_copy_is_a_separate_module_and_not_attached(
    engine_of: Callable[..., ModuleEngine], how: Callable[[nn.Module], nn.Module], own_forward: bool
) -> None:
    module = Assorted()
    x = torch.randn(2, 16)
    if own_forward:  # as wrapping libraries do
        module.forward = torch.neg
    expected = module(x)
    engine = engine_of(module)
    restored = how(module)
    assert not owned(next(restored.parameters()))
    engine.close_admission("memory is released")
    assert torch.equal(restored(x), expected)
    with torch.no_grad():
        for parameter in restored.parameters():
            parameter.zero_()
    assert torch.equal(restored(x), expected) is own_forward  # it computes with its own weights


def test_a_closed_engine_gates_nothing(engine_of: Callable[..., ModuleEngine]) -> None:
    module, wrapped = Called(), Called()
    own = module.forward = module.forward
    engine = engine_of(module, wrapped)
    outer = wrapped.forward
    wrapped.forward = lambda work: outer(work)  # replaced by other code meanwhile
    engine.close_admission("memory is released")
    engine.close()
    engine.close()
    assert module.forward == own
    assert module(lambda: 1) == wrapped(lambda: 1) == 1


def test_disabled_it_moves_nothing_and_serves() -> None:
    program = (
        "import torch, memsaver_core as ms\n"
        "from memsaver_server.integrations.module import ModuleEngine\n"
        "module = torch.nn.Linear(4, 4)\n"
        "where = module.weight.data_ptr()\n"
        "engine = ModuleEngine(module)\n"
        "with engine.workspace():\n"
        "    print(module(torch.ones(4)).shape[0], module.weight.data_ptr() == where, ms.status().enabled)\n"
    )
    assert output_of(program, MEMSAVER_ENABLED="0") == "4 True False\n"
