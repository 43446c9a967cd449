"""The script of torch_memory_saver's README, without any reference to memsaver.

Run it as ``script.py HOOK_MODE BYTES``: the hook mode, and the size of a tensor.
"""

import sys

import torch
from torch_memory_saver import torch_memory_saver
from torch_memory_saver.testing_utils import empty_cache, get_and_print_gpu_memory, get_device

mode, size = sys.argv[1], int(sys.argv[2])
device = get_device()
torch_memory_saver.hook_mode = mode


def tensor_of(value: int) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8, device=device)


# A tensor that is paused and resumed: its memory goes, its address stays.
with torch_memory_saver.region():
    pausable = tensor_of(100)
address = pausable.data_ptr()
resident = get_and_print_gpu_memory("resident")
torch_memory_saver.pause()
assert get_and_print_gpu_memory("paused") <= resident - size // 2
torch_memory_saver.resume()
assert get_and_print_gpu_memory("resumed") >= resident - size // 2
assert pausable.data_ptr() == address
pausable.fill_(1)
assert int(pausable[-1]) == 1

# Two tags, in one order and in the other.
with torch_memory_saver.region(tag="type1"):
    first = tensor_of(100)
with torch_memory_saver.region(tag="type2"):
    second = tensor_of(100)
resident = get_and_print_gpu_memory("two tags")
torch_memory_saver.pause("type1")
torch_memory_saver.pause("type2")
assert get_and_print_gpu_memory("both paused") <= resident - size
torch_memory_saver.resume("type2")
second.fill_(2)
torch_memory_saver.resume("type1")
torch_memory_saver.pause("type1")
assert int(second[-1]) == 2
torch_memory_saver.resume("type1")
first.fill_(1)

# Content that is kept, with and without the memory that keeps it.
with torch_memory_saver.region(enable_cpu_backup=True):
    kept = tensor_of(42)
for retain in (False, True, True, False):
    torch_memory_saver.retain_cpu_backup = retain
    torch_memory_saver.pause()
    torch_memory_saver.resume()
    assert int(kept[0]) == int(kept[-1]) == 42
    assert (torch_memory_saver.get_cpu_backup(kept) is not None) == retain

# The rollout of a training step, with a captured graph whose own memory goes, too.
if device == "cuda" and mode == "preload":
    with torch.no_grad():
        with torch_memory_saver.region(tag="weights", enable_cpu_backup=True):
            layer = torch.nn.Linear(256, 256, device=device)
        with torch_memory_saver.region(tag="kv_cache"):
            cache = torch.zeros(size // 4, device=device)
        inputs = torch.ones(16, 256, device=device)
        layer(inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch_memory_saver.cuda_graph(graph, tag="graph", enable_cpu_backup=True):
            output = layer(inputs) + cache[0]
        graph.replay()
        expected = output.clone()
        for _ in range(2):
            resident = get_and_print_gpu_memory("rollout")
            for tag in ("kv_cache", "weights", "graph"):
                torch_memory_saver.pause(tag)
            assert get_and_print_gpu_memory("training") <= resident - size // 2
            training = tensor_of(7)
            del training
            empty_cache()
            for tag in ("weights", "graph", "kv_cache"):
                torch_memory_saver.resume(tag)
            cache.zero_()
            graph.replay()
            assert torch.equal(output, expected)

print("done")
