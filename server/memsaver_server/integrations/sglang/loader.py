"""SGLang's load format ``memsaver``: weights from the shared store if it has them, else as SGLang loads them itself."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import memsaver_core as ms
from memsaver_core.compat.loading import LOAD_FORMAT, tensors_of, weights_key
from memsaver_core.compat.patching import when_imported
from memsaver_core.updates import filled_tags

logger = logging.getLogger("memsaver")

LOADER = "sglang.srt.model_loader.loader"
#: Options of SGLang on which the content of a rank's tensors depends, even if the shapes are the same.
OPTIONS = (
    *("tp_size", "pp_size", "dp_size", "ep_size", "moe_dense_tp_size", "enable_dp_attention", "enable_dp_lm_head"),
    *("ep_num_redundant_experts", "init_expert_location", "moe_a2a_backend", "moe_runner_backend"),
    *("disable_shared_experts_fusion", "json_model_override_args"),
)


def register() -> dict[str, Callable[..., Any]]:
    """Have SGLang's command line accept the load format; return the hooks around SGLang's functions."""
    when_imported("sglang.srt.server_args", lambda module: module.add_load_format_choices([LOAD_FORMAT]))
    configuration = "sglang.srt.configs.load_config.LoadConfig._verify_load_format"
    return {
        configuration: _verify_load_format,
        f"{LOADER}.DefaultModelLoader.load_model": _load_model,
        f"{LOADER}.DefaultModelLoader.load_weights_and_postprocess": _update_weights,
    }


def _verify_load_format(original: Callable[[Any], None], config: Any) -> None:
    """Have SGLang choose the loader as for ``auto``."""
    config.memsaver = config.load_format == LOAD_FORMAT
    if config.memsaver:
        config.load_format = "auto"
    original(config)


def _load_model(original: Callable[..., Any], loader: Any, *, model_config: Any, **named: Any) -> Any:
    """Fill a new model, as it is before SGLang processes its weights. Updates of weights do not come here."""
    if not getattr(loader.load_config, "memsaver", False):
        return original(loader, model_config=model_config, **named)
    if not Path(model_config.model_path).is_dir():
        loader.download_model(model_config)
    if (key := _key(loader.load_config, model_config)) is not None:
        loader.load_weights_and_postprocess = partial(_load_weights, key, loader.load_weights_and_postprocess)
    return original(loader, model_config=model_config, **named)


def _update_weights(original: Callable[..., None], *arguments: Any) -> None:
    """Do nothing in an update whose content has come from the shared store."""
    if "weights" not in filled_tags:
        original(*arguments)


def _load_weights(
    key: ms.WeightsKey, original: Callable[..., None], model: torch.nn.Module, weights: Iterable[Any], device: Any
) -> None:
    """As ``DefaultModelLoader.load_weights_and_postprocess``, the first part of which calls ``model.load_weights``."""
    write: Callable[..., Any] = model.load_weights  # type: ignore[assignment]
    finish = getattr(model, "post_load_weights", None)  # called by ``write``
    if finish is not None and key.quantization:
        logger.warning("weights are not shared, because the model changes quantized weights while it loads them")
        original(model, weights, device)
        return

    def load(weights: Iterable[Any]) -> None:
        came_from_store = not ms.load_weights(key, partial(tensors_of, model), partial(write, weights))
        if came_from_store and finish is not None:
            finish()

    model.load_weights = load  # type: ignore[assignment]
    try:
        original(model, weights, device)
    finally:
        del model.load_weights


def _key(config: Any, model_config: Any) -> ms.WeightsKey | None:
    """Return what this rank's weights are; replicas have the same. None, with a warning, if they cannot be shared."""
    options = importlib.import_module(LOADER).get_server_args()
    backup = f"enable_{'draft_' if getattr(model_config, 'is_draft_model', False) else ''}weights_cpu_backup"
    if not options.enable_memory_saver or not getattr(options, backup, False):
        logger.warning(
            "weights are not shared: start with --enable-memory-saver and --%s, too", backup.replace("_", "-")
        )
        return None
    version = importlib.import_module("sglang.version").__version__
    chosen = [getattr(options, name, None) for name in OPTIONS]
    return weights_key(
        model_config.model_path,
        model_config,
        config.download_dir,
        rank=torch.distributed.get_rank(),
        ranks=torch.distributed.get_world_size(),
        program=f"sglang {version}, draft {getattr(config, 'draft_model_idx', None)}, {chosen}",
    )
