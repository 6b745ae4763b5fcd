"""The attention layers of a worker, and which engines and layers are refused by name.

What this file and the recorder read of vLLM changes between minor versions, without notice.
"""

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from headwise.errors import ArgumentError, UnsupportedError
from headwise.kernels import pages

TESTED = ("0.32",)  # minor versions


def layers_of(worker: Any, numbers: Collection[int] | None) -> tuple[str, dict[int, Any]]:
    """The version of vLLM, and the attention layers to watch by number, each of them checked.

    Raises:
        UnsupportedError: the version, configuration or a layer cannot be watched.
        ArgumentError: there is no such layer.
    """
    import vllm
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.models.utils import extract_layer_index

    config = worker.vllm_config
    why = why_not_served(vllm.__version__, config, worker.model_runner)
    if why is not None:
        raise UnsupportedError(f"vllm.watch: {why}.")
    layers: dict[int, Any] = {}
    for name, layer in config.compilation_config.static_forward_context.items():
        if not isinstance(layer, AttentionLayerBase):
            continue  # experts and the like
        number = extract_layer_index(name)
        if numbers is not None and number not in numbers:
            continue
        why = "is the second of its number" if number in layers else None
        why = why or why_no_layer(layer, type(layer) is Attention)
        if why is not None:
            raise UnsupportedError(f"vllm.watch: {name} {why}. Leave it out with layers=.")
        layers[number] = layer
    missing = [number for number in numbers or () if number not in layers]
    if missing or not layers:
        raise ArgumentError(f"vllm.watch: layers {missing} do not exist. There are {[*layers]}.")
    return vllm.__version__, dict(sorted(layers.items()))


def why_not_served(version: str, config: Any, runner: Any) -> str | None:
    """The reason why this engine cannot be watched; None if it can."""
    parallel, cache = config.parallel_config, config.cache_config
    reasons = {
        f"vLLM {version} was not tested; {', '.join(TESTED)} was. Install that minor version":
            not any(version.startswith(f"{minor}.") for minor in TESTED),
        "only vLLM on a CPU is watched": config.device_config.device_type != "cpu",
        "the model is split over several processes, whose heads are not put together":
            parallel.world_size > 1 or parallel.data_parallel_size > 1,
        "context parallelism splits the keys of a request":
            parallel.prefill_context_parallel_size > 1 or parallel.decode_context_parallel_size > 1,
        "speculative decoding would count drafts that are rejected": config.speculative_config,
        "latent attention (MLA) keeps no keys by head": config.model_config.use_mla,
        "keys in fp8 are not read; start with kv_cache_dtype='auto'":
            str(cache.cache_dtype).startswith("fp8"),
        "kv_sharing_fast_prefill leaves queries out": cache.kv_sharing_fast_prefill,
        "runner V2 does not say which request a row belongs to; set VLLM_USE_V2_MODEL_RUNNER=0":
            not (hasattr(runner, "requests") and hasattr(runner, "input_batch")),
    }  # fmt: skip
    return next((reason for reason, holds in reasons.items() if holds), None)


def why_no_layer(layer: Any, is_plain: bool) -> str | None:
    """The reason why a layer cannot be watched; None if it can. `open_pages` checks its pages."""
    impl = layer.impl
    reasons = {
        f"is {type(layer).__name__}, not plain attention": not is_plain,
        "attends to images in both directions": getattr(layer, "use_mm_prefix", False),
        f"has {type(impl).__name__}, not vLLM's CPU backend":
            type(impl).__name__ != "CPUAttentionBackendImpl",
        "is no decoder": getattr(impl, "attn_type", "") != "decoder",
        "has ALiBi, which the kernel lacks": getattr(impl, "alibi_slopes", None) is not None,
        "has learned sinks, which the kernel lacks": getattr(impl, "sinks", None) is not None,
        "is watched already": "forward" in vars(impl),
    }  # fmt: skip
    return next((reason for reason, holds in reasons.items() if holds), None)


def open_pages(layer: Any) -> pages.PageLayer:
    """Describe a layer to the kernel, which must know the layout of its pages.

    The layout is tested: vLLM writes keys into two scratch blocks, and the sums of one query that
    the kernel reads there are compared with PyTorch's.

    Raises:
        UnsupportedError: the layout or the width of a head is another.
    """
    from vllm import _custom_ops as ops

    name, cache = layer.layer_name, layer.kv_cache
    widths = layer.attn_backend.get_supported_head_sizes()
    if layer.head_size not in widths or cache.ndim != 4:
        raise UnsupportedError(
            f"vllm.watch: {name} has heads of width {layer.head_size} and a cache of {cache.ndim} "
            f"axes. vLLM's CPU backend has the widths {widths}, and caches of 4 axes."
        )
    opened = pages.open_layer(layer)
    generator = torch.Generator().manual_seed(0)
    size = opened.page + 3, opened.Hkv, opened.D
    keys = torch.randn(size, generator=generator, dtype=torch.float32).to(cache.dtype)
    scratch = torch.zeros_like(cache[:2])
    halves = scratch.view(2, opened.Hkv, 2 * opened.page, -1).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(
        keys, keys, *halves, torch.arange(len(keys)), layer.isa,
        k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto",
    )  # fmt: skip
    plain = SimpleNamespace(scale=1.0, logits_soft_cap=0.0, sliding_window=-1)
    fields = {"layer_name": name, "isa": layer.isa, "num_heads": opened.Hkv, "impl": plain}
    sums = pages.empty_sums(opened.Hkv)
    groups = np.array([[0, 1, 0, sums.ctypes.data, *[0] * 2 * pages.SPANS]])
    step = pages.make_step(groups, np.array([[0, len(keys) - 1]]))
    table = torch.arange(2, dtype=torch.int32)[None]
    one = pages.open_layer(SimpleNamespace(kv_cache=scratch, **fields))
    pages.add_rows(one, step, table, keys[-1:])
    expected = torch.einsum("hd,shd->hs", keys[-1].float(), keys.float()).logsumexp(1).numpy()
    read = sums[:, pages.STATISTICS.index("lse"), 0]
    if not np.allclose(read, expected, rtol=1e-2):
        raise UnsupportedError(
            f"vllm.watch: {name}: vLLM's pages do not lie as its layout {layer.isa!r} did in "
            f"version {' or '.join(TESTED)}: the sum of a query is {read[0]:.3f}, not "
            f"{expected[0]:.3f}. Install that version."
        )
    return opened
