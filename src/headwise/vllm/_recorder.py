"""In the worker: the sums of each request, from vLLM's own queries and pages of keys.

The recorder shadows `forward` of each watched layer's implementation, and `execute_model` of the
worker, by an attribute of that one object. No class of vLLM is changed, and when the watch ends
the attributes are deleted. This reaches compiled models too, because vLLM keeps attention outside
of what it compiles.
"""

import io
import json
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headwise.errors import ArgumentError, UnsupportedError
from headwise.models import fingerprint
from headwise.tables import Head, resolve_heads
from headwise.vllm._answer import answer_prompts, rule_of
from headwise.vllm._options import Options
from headwise.vllm._pages import (
    LAYOUTS,
    SPANS,
    STATISTICS,
    PageLayer,
    Step,
    Sums,
    add_rows,
    make_step,
    open_layer,
)
from headwise.vllm._positions import counted_positions, read_spans

# What this file reads of vLLM changes between minor versions; these were tested.
TESTED = ("0.32",)
# vLLM appends eight characters to the name that a client gave.
_SUFFIX = re.compile(r"-[0-9a-f]{8}$")


@dataclass
class Entry:
    """A request: the first of its two cells, and what was read of it."""

    cell: int
    prompt: int
    problem: str  # why its spans cannot be read
    read: int = 0  # tokens, those of the prefix cache included
    counted: tuple[int, int] = (0, 0)  # queries, by phase


class Recorded(NamedTuple):
    """A request that has ended, or a copy of one that has not.

    Attributes:
        about: Its name, and for each phase the queries that count and the tokens.
        sums: Of the chosen heads, in all cells of the request.
    """

    about: dict[str, Any]
    sums: Sums


class StepRows(NamedTuple):
    """The rows of one step that count; see `make_step`.

    Attributes:
        starts: The first token of each request in the batch, and one past the last.
        is_whole: Whether the step reads whole prompts alone.
    """

    starts: list[int]
    groups: np.ndarray
    rows: np.ndarray
    is_whole: bool


class RequestRecorder:
    """Watches the layers of one worker, from its making until `close`."""

    def __init__(self, worker: Any, options: Options) -> None:
        self.worker, self.runner = worker, worker.model_runner
        self.every, self.spans = options["every"], options["spans"]
        layers = _layers_of(worker, options["layers"])
        existing = {
            Head("", number, head): head * layer.num_kv_heads // layer.num_heads
            for number, layer in layers.items()
            for head in range(layer.num_heads)
        }
        names = options["heads"]
        chosen = list(existing) if names is None else resolve_heads(names, existing)
        self.heads = sorted(chosen, key=lambda head: head.layer)
        self.kv_heads = [existing[head] for head in self.heads]
        numbers = sorted({head.layer for head in self.heads})
        self.layers = {number: _open(layers[number]) for number in numbers}
        # The rows of a layer among the chosen heads.
        self.rows = {n: [head.head for head in self.heads if head.layer == n] for n in numbers}
        self.statistics = tuple(options["statistics"])
        self.columns = [(*STATISTICS, *self.spans).index(name) for name in self.statistics]
        self.exact = options["exact"]
        self.entries: dict[str, Entry] = {}
        self.ended: list[Recorded] = []
        self.on_end = self.ended.append  # a server writes a line instead
        self.free: list[int] = []
        self.stretches = np.zeros((0, SPANS, 2), np.int64)
        self.batch: StepRows | None = None  # of the step that runs
        self.steps: dict[int, tuple[Any, Step]] = {}  # by identity of the block table
        self._grow()
        for number, layer in self.layers.items():
            self._shadow(layers[number].impl, layer)
        self.impls = [layers[number].impl for number in numbers]
        self.execute = worker.execute_model
        worker.execute_model = self._execute

    def close(self) -> None:
        """Leave every object as it was."""
        del self.worker.execute_model
        for impl in self.impls:
            del impl.forward

    def _shadow(self, impl: Any, watched: PageLayer) -> None:
        forward = impl.forward
        rule = None if self.exact else rule_of(impl)

        def forward_and_record(
            layer: Any, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, metadata: Any,
            output: Tensor, *args: Any, **kwargs: Any,
        ) -> Tensor:  # fmt: skip
            if metadata is None:  # vLLM warms up
                return forward(layer, query, key, value, cache, metadata, output, *args, **kwargs)
            batch = self.batch = self.batch or self._read(metadata)
            if rule is not None and batch.is_whole:
                tokens = query, key, value
                answer_prompts(watched, rule, tokens, output, *batch[:3], self.stretches)
                return output
            step = self._step(metadata, batch)
            result = forward(layer, query, key, value, cache, metadata, output, *args, **kwargs)
            if step is not None:
                add_rows(watched, step, query)
            return result

        impl.forward = forward_and_record

    def _execute(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        # Those that ended may have their names taken again in this very step.
        for name in scheduled.finished_req_ids:
            if name in self.entries:
                self._finish(name)
        self.batch, self.steps = None, {}
        return self.execute(scheduled, *args, **kwargs)

    def _step(self, metadata: Any, batch: StepRows) -> Step | None:
        """The rows of this step that count, for layers with this block table; None: there are none.

        Layers of another kind (window or none) have their own table, and the same rows.
        """
        if not len(batch.groups):
            return None
        table = metadata.block_table
        if id(table) not in self.steps:  # the table is kept, so that its identity is not reused
            step = make_step(table, batch.groups, batch.rows, self.stretches)
            self.steps[id(table)] = table, step
        return self.steps[id(table)][1]

    def _read(self, metadata: Any) -> StepRows:
        if metadata.causal is not True or metadata.dynamic_causal is not None:
            raise UnsupportedError("vllm.watch: attention that is not causal. End the watch first.")
        starts, ends = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        groups, rows, n_rows, is_whole = [], [], 0, True
        for index, name in enumerate(self.runner.input_batch.req_ids[: len(ends)]):
            entry = self.entries.get(name) or self._begin(name)
            first, end = ends[index] - (starts[index + 1] - starts[index]), ends[index]
            is_whole &= first == 0 and end == entry.prompt and entry.read == 0
            # What is read again after a preemption counted already.
            parts = counted_positions(max(first, entry.read), end, entry.prompt, self.every)
            entry.read = max(entry.read, end)
            entry.counted = entry.counted[0] + len(parts[0]), entry.counted[1] + len(parts[1])
            for phase, positions in enumerate(parts):
                if len(positions):
                    rows.append(np.stack([positions + (starts[index] - first), positions], 1))
                    groups.append((n_rows, n_rows + len(positions), index, entry.cell + phase))
                    n_rows += len(positions)
        all_rows = np.concatenate([*rows, np.zeros((0, 2), np.int64)])
        return StepRows(starts, np.array(groups, np.int64).reshape(-1, 4), all_rows, is_whole)

    def _begin(self, name: str) -> Entry:
        if not self.free:
            self._grow()
        request = self.runner.requests[name]
        entry = Entry(self.free.pop(), request.num_prompt_tokens, "")
        sent = (getattr(request.sampling_params, "extra_args", None) or {}).get("headwise", "")
        try:  # a client that writes nonsense must not stop the engine
            stretches = read_spans(sent, self.spans)
        except ArgumentError as error:
            stretches, entry.problem = {}, str(error)
        for column, span in enumerate(self.spans):
            self.stretches[entry.cell : entry.cell + 2, column] = stretches.get(span, (0, 0))
        self.entries[name] = entry
        return entry

    def _grow(self) -> None:
        """Make room for twice as many requests at once."""
        n_cells = len(self.stretches)
        size = max(32, 2 * n_cells)
        self.free = list(range(n_cells, size, 2))
        more = np.zeros((size - n_cells, *self.stretches.shape[1:]), np.int64)
        self.stretches = np.concatenate([self.stretches, more])
        for layer in self.layers.values():
            sums = Sums.empty(size, layer.H)
            if n_cells:
                for new, old in zip(sums, layer.sums, strict=True):
                    new[:n_cells] = old
            layer.add_to(sums)

    def _finish(self, name: str) -> None:
        recorded = self._recorded(name)
        entry = self.entries.pop(name)
        cells = slice(entry.cell, entry.cell + 2)
        for layer in self.layers.values():
            for part, empty in zip(layer.sums, Sums.empty(2, layer.H), strict=True):
                part[cells] = empty
        self.free.append(entry.cell)
        self.on_end(recorded)

    def _recorded(self, name: str) -> Recorded:
        """A copy of the sums of a request: of the chosen heads and statistics alone."""
        entry = self.entries[name]
        cells = slice(entry.cell, entry.cell + 2)

        def chosen(part: np.ndarray, rows: list[int]) -> np.ndarray:
            if part.ndim == 2:  # counts are those of every head
                return np.repeat(part[cells][:, None], len(rows), 1)
            return part[cells][:, rows]

        by_layer = [
            [chosen(part, self.rows[number]) for part in layer.sums]
            for number, layer in self.layers.items()
        ]
        sums = [
            np.concatenate(parts, 1)[..., self.columns] for parts in zip(*by_layer, strict=True)
        ]
        tokens = min(entry.read, entry.prompt), max(0, entry.read - entry.prompt)
        about = {
            "name": name,
            "request": _SUFFIX.sub("", name),
            "queries": list(entry.counted),
            "tokens": list(tokens),
            "problem": entry.problem,
        }
        return Recorded(about, Sums(*sums))

    def header(self) -> dict[str, Any]:
        """What holds for all requests."""
        import vllm

        return {
            "heads": [str(head) for head in self.heads],
            "kv_heads": self.kv_heads,
            "model": fingerprint(self.runner.model),
            "vllm": vllm.__version__,
        }

    def take(self) -> bytes:
        """The requests that ended since the last call, and copies of those that have not.

        An .npz of numbers alone: nothing is pickled, here or by vLLM.
        """
        recorded = [*self.ended, *(self._recorded(name) for name in self.entries)]
        self.ended.clear()
        header = json.dumps([record.about for record in recorded]).encode()
        arrays = {
            name: np.stack([getattr(record.sums, name) for record in recorded])
            for name in Sums._fields
            if recorded
        }
        file = io.BytesIO()
        arrays["about"] = np.frombuffer(header, np.uint8)
        np.savez(file, allow_pickle=False, **arrays)
        return file.getvalue()


def _layers_of(worker: Any, numbers: list[int] | None) -> dict[int, Any]:
    """The attention layers to watch, by number; all of them are checked.

    Raises:
        UnsupportedError: the version, configuration or a layer cannot be watched.
        ArgumentError: there is no such layer.
    """
    import vllm
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.models.utils import extract_layer_index

    version = vllm.__version__
    config = worker.vllm_config
    why = _why_not_served(version, config, worker.model_runner)
    if why is not None:
        raise UnsupportedError(f"vllm.watch: {why}")
    layers: dict[int, Any] = {}
    for name, layer in config.compilation_config.static_forward_context.items():
        if not isinstance(layer, AttentionLayerBase):
            continue  # experts and the like
        number = extract_layer_index(name)
        if numbers is not None and number not in numbers:
            continue
        why = "is the second of its number" if number in layers else None
        why = why or _why_no_layer(layer, type(layer) is Attention)
        if why is not None:
            raise UnsupportedError(f"vllm.watch: {name} {why}. Leave it out with layers=.")
        layers[number] = layer
    missing = sorted(set(numbers or ()) - set(layers))
    if missing or not layers:
        raise ArgumentError(f"vllm.watch: layers {missing} do not exist. There are {[*layers]}.")
    return dict(sorted(layers.items()))


def _why_not_served(version: str, config: Any, runner: Any) -> str | None:
    """Why no layer of this engine can be watched, if none can."""
    parallel = config.parallel_config
    reasons = {
        f"vLLM {version} was not tested; {', '.join(TESTED)} was. Install that minor version":
            not any(version.startswith(f"{minor}.") for minor in TESTED),
        "only vLLM on a CPU is watched": config.device_config.device_type != "cpu",
        "the model is split over several processes, whose heads are not put together":
            parallel.world_size > 1 or parallel.data_parallel_size > 1,
        "context parallelism splits the keys of a request":
            parallel.prefill_context_parallel_size > 1 or parallel.decode_context_parallel_size > 1,
        "speculative decoding would count drafts that are rejected":
            config.speculative_config is not None,
        "latent attention (MLA) keeps no keys by head": config.model_config.use_mla,
        "keys in fp8 are not read; start with kv_cache_dtype='auto'":
            str(config.cache_config.cache_dtype).startswith("fp8"),
        "kv_sharing_fast_prefill leaves queries out": config.cache_config.kv_sharing_fast_prefill,
        "runner V2 does not say which request a row belongs to; set VLLM_USE_V2_MODEL_RUNNER=0":
            not (hasattr(runner, "requests") and hasattr(runner, "input_batch")),
    }  # fmt: skip
    return next((f"{reason}." for reason, holds in reasons.items() if holds), None)


def _why_no_layer(layer: Any, is_plain: bool) -> str | None:
    """Why a layer cannot be watched, if it cannot."""
    impl = layer.impl
    isa = getattr(layer, "isa", None)
    reasons = {
        f"is {type(layer).__name__}, not plain attention": not is_plain,
        "attends to images in both directions": getattr(layer, "use_mm_prefix", False),
        f"has {type(impl).__name__}, not vLLM's CPU backend":
            type(impl).__name__ != "CPUAttentionBackendImpl",
        "is no decoder": getattr(impl, "attn_type", "") != "decoder",
        "has ALiBi, which the kernel lacks": getattr(impl, "alibi_slopes", None) is not None,
        "has learned sinks, which the kernel lacks": getattr(impl, "sinks", None) is not None,
        f"has pages in the layout {isa!r}; {', '.join(LAYOUTS)} are read": isa not in LAYOUTS,
        "is watched already": "forward" in vars(impl),
    }  # fmt: skip
    return next((reason for reason, holds in reasons.items() if holds), None)


def _open(layer: Any) -> PageLayer:
    """Describe a layer to the kernel, after its pages were found to lie as the kernel reads them.

    Raises:
        UnsupportedError: they lie otherwise, or the width of a head is not served.
    """
    impl, cache = layer.impl, layer.kv_cache
    widths = layer.attn_backend.get_supported_head_sizes()
    if layer.head_size not in widths or cache.ndim != 4:
        raise UnsupportedError(
            f"vllm.watch: {layer.layer_name} has heads of width {layer.head_size} and a cache of "
            f"{cache.ndim} axes. vLLM's CPU backend has the widths {widths}, and caches of 4 axes."
        )
    _check_pages(layer.layer_name, layer.isa, cache)
    return open_layer(
        layer.layer_name, layer.isa, cache, layer.num_heads,
        scale=impl.scale, softcap=float(impl.logits_soft_cap), window=impl.sliding_window,
    )  # fmt: skip


def _check_pages(name: str, isa: str, cache: Tensor) -> None:
    """Let vLLM write two blocks of keys, and compare the sums of one query with plain PyTorch's.

    The layout of a page is what changes between releases, without notice.

    Raises:
        UnsupportedError: they differ.
    """
    from vllm import _custom_ops as ops

    _, Hkv, page, both = cache.shape
    generator = torch.Generator().manual_seed(0)
    shape = page + 3, Hkv, both // 2
    keys = torch.randn(shape, generator=generator, dtype=torch.float32).to(cache.dtype)
    scratch = torch.zeros(2, Hkv, page, both, dtype=cache.dtype)
    halves = scratch.view(2, Hkv, 2 * page, -1).chunk(2, dim=2)
    slots = torch.arange(len(keys), dtype=torch.int64)
    ops.cpu_attn_reshape_and_cache(
        keys, keys, *halves, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
    )
    layer = open_layer(name, isa, scratch, Hkv, scale=1.0)
    layer.add_to(Sums.empty(1, Hkv))
    groups, rows = np.array([[0, 1, 0, 0]]), np.array([[0, len(keys) - 1]])
    table = torch.arange(2, dtype=torch.int32)[None]
    add_rows(layer, make_step(table, groups, rows, np.zeros((1, SPANS, 2), np.int64)), keys[-1:])
    expected = torch.einsum("hd,shd->hs", keys[-1].float(), keys.float()).logsumexp(1).numpy()
    sums = layer.sums.total[0, :, STATISTICS.index("lse")]
    if not np.allclose(sums, expected, rtol=1e-2):
        raise UnsupportedError(
            f"vllm.watch: {name}: vLLM's pages do not lie as its layout {isa!r} did in version "
            f"{' or '.join(TESTED)}. Install that version."
        )
