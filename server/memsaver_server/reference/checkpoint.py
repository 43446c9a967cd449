"""Models on their way into the ``weights`` region: a checkpoint folder, a built-in small one, or a bare shape."""

from __future__ import annotations

import atexit
import math
import os
import shutil
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config

import memsaver_core as ms
from memsaver_server.reference.attention import ATTENTION_NAME

# transformers and parts of torch are typed in some versions and not in others.
_Models: Any = AutoModelForCausalLM
_FastTokenizer: Any = PreTrainedTokenizerFast
_cuda: Any = torch.cuda

#: Part of the built-in checkpoint's folder name: change it whenever the recipe below changes.
_RECIPE = "small-qwen2-1"
_SEED = 20260


class Tokenizer:
    """Text to ids and back, from any thread."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()  # fast tokenizers refuse to be borrowed twice

    def encode(self, text: str) -> list[int]:
        with self._lock:
            return [int(i) for i in self._tokenizer.encode(text)]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        with self._lock:
            return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))


def load_checkpoint(folder: Path, dtype: torch.dtype | None = None) -> Any:
    """Return the causal language model in ``folder``, in host memory and ready to be moved to its device.

    transformers loads tensors from threads of its own, which a region does not see: hence host memory first.

    Raises:
        ValueError: the folder holds no checkpoint that this engine can serve.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is not a checkpoint folder: it has no config.json")
    try:
        model = _Models.from_pretrained(
            str(folder), dtype=dtype or "auto", local_files_only=True, attn_implementation=ATTENTION_NAME
        )
    except SafetensorError as error:
        raise ValueError(f"a file of {folder} is damaged: {error}") from None
    return _ready(model)


def create_random(config_file: Path, device: torch.device, dtype: torch.dtype | None, seed: int) -> Any:
    """Return a model of the shape in ``config_file`` with seeded random weights, created where they stay.

    Call it inside the region: nothing passes through host memory, however big the shape.

    Raises:
        ValueError: the file is not the configuration of a model that this engine can serve.
    """
    if not config_file.is_file():
        raise ValueError(f"{config_file} does not exist; give the config.json of a model")
    config = AutoConfig.from_pretrained(str(config_file))
    with torch.device("meta"):
        model = _Models.from_config(
            config, dtype=dtype or config.dtype or torch.float32, attn_implementation=ATTENTION_NAME
        )
    model.tie_weights()
    _materialize(model, device)
    # Puts right what is computed and not stored (rotary frequencies and the like); its random numbers are replaced.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        model.initialize_weights()
    _fill_random(model, seed)
    return _ready(model)


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """Return the tokenizer in ``folder``, or None where it has none."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")):
        return None
    return Tokenizer(AutoTokenizer.from_pretrained(str(folder), local_files_only=True))


def byte_tokenizer() -> Tokenizer:
    """A tokenizer whose ids are the bytes of the text, for models that have none of their own."""
    return Tokenizer(_byte_level())


def small_checkpoint() -> Path:
    """Return the folder of the built-in checkpoint: a small Qwen2 with fixed-seed weights, written at first use.

    It lies in the user's cache folder, or in a temporary one of this process where that cannot be written.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "memsaver" / _RECIPE
    if (folder / "config.json").is_file():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        return _write_small(folder)
    except OSError:
        private = Path(tempfile.mkdtemp(prefix="memsaver-"))
        atexit.register(shutil.rmtree, private, ignore_errors=True)
        return _write_small(private / _RECIPE)


def tensors_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Every parameter and buffer, by name, those shared between modules once."""
    seen: set[int] = set()
    found = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found.append((name, tensor))
    return found


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind ``tensors``, shared ones once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def check_in_region(model: nn.Module, tag: str, bytes_before: int) -> None:
    """Check that everything the model holds was allocated under ``tag``, which held ``bytes_before`` before.

    A tensor outside would survive a release, and the memory it takes would never come back.

    Raises:
        RuntimeError: something lies outside the region; the message names it.
    """
    if not ms.enabled():
        return
    tensors = tensors_of(model)
    astray = _in_torchs_own_pool(tensors)
    held = next((t.bytes for t in ms.status().tags if t.tag == tag), 0) - bytes_before
    needed = storage_bytes(tensor for _, tensor in tensors)
    if astray or held < needed:
        raise RuntimeError(
            f"the model's tensors take {needed} bytes, but the region {tag!r} received {held}"
            + (f"; outside are {', '.join(astray[:8])}" if astray else "")
            + ". A release would not return them: create them inside the region, or bring them in with adopt()"
        )


def _in_torchs_own_pool(tensors: list[tuple[str, Tensor]]) -> list[str]:
    """The names of those in the pool that torch has for what no region asked for. Host memory has no pools."""
    if all(tensor.device.type != "cuda" for _, tensor in tensors):
        return []
    own = [
        range(segment["address"], segment["address"] + segment["total_size"])
        for segment in _cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) == (0, 0)
    ]
    return [name for name, tensor in tensors if any(tensor.untyped_storage().data_ptr() in each for each in own)]


def _ready(model: Any) -> Any:
    """``model`` as the engine serves it.

    Raises:
        ValueError: its attention cannot run over slots.
    """
    kinds = set(getattr(model.config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if not getattr(model, "_supports_attention_backend", False) or kinds:
        raise ValueError(
            f"{type(model).__name__} cannot be served: this engine needs transformers' attention interface"
            + (f", and cannot do its layers of type {', '.join(sorted(kinds))}" if kinds else "")
        )
    model.eval()
    model.requires_grad_(False)
    return model


def _materialize(model: nn.Module, device: torch.device) -> None:
    """Give each parameter and buffer memory on ``device``; one shared between modules stays shared."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for name, old in store.items():
                if old is None or old.device.type != "meta":
                    continue
                if id(old) not in made:
                    new: Tensor = torch.empty_like(old, device=device)
                    made[id(old)] = nn.Parameter(new, requires_grad=False) if isinstance(old, nn.Parameter) else new
                store[name] = made[id(old)]


def _fill_random(model: Any, seed: int) -> None:
    """Seeded weights large enough that the answer wanders through the vocabulary, as a trained model's does.

    The usual small initialization makes a model repeat one token, and equal answers would then prove little.
    """
    embedding = model.get_input_embeddings()
    generators: dict[torch.device, torch.Generator] = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.device not in generators:
                generators[parameter.device] = torch.Generator(parameter.device).manual_seed(seed)
            generator = generators[parameter.device]
            if parameter.dim() >= 2:
                gain = 1.0 if parameter is embedding.weight else 2.0
                parameter.normal_(0.0, gain / math.sqrt(parameter.shape[-1]), generator=generator)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.1, generator=generator)


def _byte_level() -> Any:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    # The byte-level alphabet: printable bytes stand for themselves, the others for the characters from 256 on.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    vocabulary = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _FastTokenizer(tokenizer_object=backend, clean_up_tokenization_spaces=False)


def _write_small(folder: Path) -> Path:
    config = Qwen2Config(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        model = _Models.from_config(config, dtype=torch.float32)
    _fill_random(model, _SEED)
    with torch.no_grad():
        for byte in {*range(256)} - {*range(32, 127)}:
            model.lm_head.weight[byte] = 0.0  # likeliest is always something that a terminal can show
    with tempfile.TemporaryDirectory(dir=folder.parent) as staging:
        written = Path(staging) / "checkpoint"
        model.save_pretrained(str(written))
        _byte_level().save_pretrained(str(written))
        try:
            written.rename(folder)  # whole or not at all, though several engines may start at once
        except OSError:
            if not (folder / "config.json").is_file():
                raise
    return folder
