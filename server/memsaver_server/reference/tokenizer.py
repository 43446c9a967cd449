"""Tokenizers: a checkpoint's own, or one of bytes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast


class Tokenizer:
    """Converts text to ids and back. Thread-safe."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()  # fast tokenizers raise if two threads use them

    def encode(self, text: str) -> list[int]:
        with self._lock:
            return [int(i) for i in self._tokenizer.encode(text)]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        with self._lock:
            return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """Return the tokenizer in ``folder``, or None if it has none."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")):
        return None
    return Tokenizer(AutoTokenizer.from_pretrained(str(folder), local_files_only=True))


def byte_level() -> Any:
    """Return transformers' form of a tokenizer whose ids are the bytes of the text, for models without one."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    # The byte-level alphabet: printable bytes stand for themselves, the others for the characters from 256 on.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    vocabulary = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast  # typed in some versions of transformers only
    return fast(tokenizer_object=backend, clean_up_tokenization_spaces=False)
