"""A program that uses tokenspeed's class ``Engine``: what its calls for memory answer."""

from __future__ import annotations

import sys

# In each scheduler, too: `spawn` imports this module there.
from tests.tokenspeed import program  # noqa: F401


def main(model: str) -> None:
    from tokenspeed.runtime.entrypoints.engine import Engine

    engine = Engine(
        model=model, enable_memory_saver=True, enable_prefix_caching=False, disable_kvstore=True, max_model_len=4096,
        max_num_seqs=32, attention_backend="triton", sampling_backend="greedy", grammar_backend="none",
    )  # fmt: skip
    release, resume = engine.release_memory_occupation, engine.resume_memory_occupation

    def text() -> str:
        return str(engine.generate("w5 w17 w60", {"temperature": 0.0, "max_new_tokens": 16})["text"])

    expected = text()
    assert expected
    assert release().success
    assert release().success
    assert not engine.resume_scheduler()
    assert engine.is_sleeping()
    assert resume(["weights"]).success
    assert engine.is_sleeping()
    assert resume(["kv_cache"]).success
    assert not engine.is_sleeping()
    assert text() == expected
    assert release(["weights"]).success
    assert engine.is_sleeping()
    assert resume().success
    assert text() == expected
    for call in (release, resume):
        refused = call(["nothing"])
        assert not refused.success
        assert "unknown tag 'nothing'" in refused.message
    assert not engine.is_sleeping()
    engine.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
