"""In the worker: the sums of each request, from vLLM's own queries and pages of keys.

The recorder shadows `forward` of each watched layer's implementation, and `execute_model` of the
worker, by an attribute of that one object. No class of vLLM is changed, and when the watch ends
the attributes are deleted. This reaches compiled models too, because vLLM keeps attention outside
of what it compiles. Which layers and engines are refused stands at the end. What this file reads
of vLLM changes between minor versions, without notice.
"""

import io
import json
import os
import re
import stat
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from headwise.errors import ArgumentError, HeadwiseError, OutputError, UnsupportedError
from headwise.kernels import AttentionRule, RowRequest, make_rule, pages
from headwise.models import fingerprint
from headwise.tables import Head, resolve_heads
from headwise.vllm._options import (
    PHASES,
    Options,
    counted_positions,
    read_spans,
    server_options,
)

# vLLM appends eight characters to the name that a client gave.
_SUFFIX = re.compile(r"-[0-9a-f]{8}$")


@dataclass
class Recording:
    """What was read of a request so far.

    Attributes:
        spans: The first position of each stretch, and one past its last.
        problem: Why its spans cannot be read.
        sums: Of all heads in the watched layers, also those that were not requested.
        read: Tokens, those of the prefix cache included.
        queries: Those that count, by phase.
    """

    name: str  # vLLM's own
    prompt: int
    spans: list[int]
    problem: str
    sums: Float64[np.ndarray, "phases heads columns 4"]
    read: int = 0
    queries: list[int] = field(default_factory=lambda: [0] * len(PHASES))


# What is sent of a request: a description in JSON, and the sums of requested heads and statistics.
Sent = tuple[dict[str, Any], Float64[np.ndarray, "phases heads statistics 4"]]


class RequestRecorder:
    """Watches the layers of one worker, from its making until `close`."""

    def __init__(self, worker: Any, options: Options) -> None:
        self.worker, self.runner = worker, worker.model_runner
        self.every, self.spans = options["every"], options["spans"]
        self.exact = options["exact"]
        version, layers = layers_of(worker, options["layers"])
        kv_heads = {
            Head("", number, head): head * layer.num_kv_heads // layer.num_heads
            for number, layer in layers.items()
            for head in range(layer.num_heads)
        }
        names = options["heads"]
        chosen = list(kv_heads) if names is None else resolve_heads(names, kv_heads)
        self.heads = sorted(chosen, key=lambda head: head.layer)
        self.about = {  # what holds for all requests
            "heads": [str(head) for head in self.heads],
            "kv_heads": [kv_heads[head] for head in self.heads],
            "model": fingerprint(self.runner.model),
            "vllm": version,
        }
        self.statistics = options["statistics"]
        columns = (*pages.STATISTICS, *self.spans)
        numbers = sorted({head.layer for head in self.heads})
        watched = [head for head in kv_heads if head.layer in numbers]
        self.n_watched = len(watched)
        self.requested = np.ix_(
            range(len(PHASES)),
            [watched.index(head) for head in self.heads],
            [columns.index(name) for name in self.statistics],
        )
        self.running: dict[str, Recording] = {}
        self.ended: list[Sent] = []
        self.on_end = self.ended.append  # a server writes a line instead
        # Of the step that runs: its rows, and its requests if our kernel answers them, which is
        # where it reads whole prompts alone: what is computed of each, its tokens in the batch, and
        # its counted positions.
        self.step: pages.PageStep | None = None
        self.prompts: list[tuple[Recording, RowRequest, slice, np.ndarray]] = []
        opened = [open_pages(layers[number]) for number in numbers]
        self.impls = [layers[number].impl for number in numbers]
        for number, impl, layer in zip(numbers, self.impls, opened, strict=True):
            layer.first_head = watched.index(Head("", number, 0))
            self._shadow(impl, layer, _rule_of(impl))
        self.execute = worker.execute_model
        worker.execute_model = self._execute

    def close(self) -> None:
        """Leave every object as it was."""
        del self.worker.execute_model
        for impl in self.impls:
            del impl.forward

    def _shadow(self, impl: Any, watched: pages.PageLayer, rule: AttentionRule) -> None:
        forward = impl.forward
        heads = slice(watched.first_head, watched.first_head + watched.H)

        def forward_and_record(
            layer: Any, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, metadata: Any,
            output: Tensor, *args: Any, **kwargs: Any,
        ) -> Tensor:  # fmt: skip
            if metadata is None:  # vLLM warms up
                return forward(layer, query, key, value, cache, metadata, output, *args, **kwargs)
            step = self.step = self.step or self._read(metadata)
            for recording, request, part, counted in self.prompts:
                tokens = query[part], key[part], value[part]
                sums = recording.sums[0, heads]
                pages.answer_prompt(rule, request, *tokens, output[part], counted, sums)
            if self.prompts:
                return output
            result = forward(layer, query, key, value, cache, metadata, output, *args, **kwargs)
            if step.n_groups:
                # Layers of another kind (window or none) have a table of their own.
                pages.add_rows(watched, step, metadata.block_table, query)
            return result

        impl.forward = forward_and_record

    def _execute(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        # Those that ended may have their names taken again in this very step.
        for name in scheduled.finished_req_ids:
            if name in self.running:
                self.on_end(self._sent(self.running.pop(name)))
        self.step = None
        return self.execute(scheduled, *args, **kwargs)

    def _read(self, metadata: Any) -> pages.PageStep:
        if metadata.causal is not True or metadata.dynamic_causal is not None:
            raise UnsupportedError("vllm.watch: attention that is not causal. End the watch first.")
        starts, ends = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        groups, rows, n_rows, prompts = [], [np.zeros((0, 2), np.int64)], 0, []
        for index, name in enumerate(self.runner.input_batch.req_ids[: len(ends)]):
            request = self.running.get(name) or self._begin(name)
            token, past, end = starts[index], starts[index + 1], ends[index]
            first = end - (past - token)
            is_whole = first == request.read == 0 and end == request.prompt
            # What is read again after a preemption counted already.
            parts = counted_positions(max(first, request.read), end, request.prompt, self.every)
            request.read = max(request.read, end)
            for phase, positions in enumerate(parts):
                if len(positions):
                    sums = request.sums[phase].ctypes.data
                    groups.append((n_rows, n_rows + len(positions), index, sums, *request.spans))
                    rows.append(np.stack([positions + (token - first), positions], 1))
                    request.queries[phase] += len(positions)
                    n_rows += len(positions)
            if is_whole and not self.exact:
                described = pages.prompt_request(end, request.spans)
                prompts.append((request, described, slice(token, past), parts[0]))
        self.prompts = prompts if len(prompts) == len(ends) else []
        return pages.make_step(
            np.array(groups, np.int64).reshape(-1, 4 + 2 * pages.SPANS), np.concatenate(rows)
        )

    def _begin(self, name: str) -> Recording:
        request = self.runner.requests[name]
        sent = (getattr(request.sampling_params, "extra_args", None) or {}).get("headwise", "")
        stretches, problem = {}, ""
        try:  # a client that writes nonsense must not stop the engine
            stretches = read_spans(sent, self.spans)
        except ArgumentError as error:
            problem = str(error)
        edges = [edge for span in self.spans for edge in stretches.get(span, (0, 0))]
        edges += [0] * (2 * pages.SPANS - len(edges))
        sums = pages.empty_sums(len(PHASES), self.n_watched)
        recording = Recording(name, request.num_prompt_tokens, edges, problem, sums)
        self.running[name] = recording
        return recording

    def _sent(self, request: Recording) -> Sent:
        about = {
            "name": request.name,
            "request": _SUFFIX.sub("", request.name),
            "queries": request.queries,
            "tokens": [min(request.read, request.prompt), max(0, request.read - request.prompt)],
            "problem": request.problem,
        }
        return about, request.sums[self.requested]

    def take(self) -> bytes:
        """The requests that ended since the last call, and copies of those that have not."""
        sent = [*self.ended, *map(self._sent, self.running.values())]
        self.ended.clear()
        about = self.about | {"requests": [about for about, _ in sent]}
        return _packed(about, np.array([sums for _, sums in sent], np.float64))


def _packed(about: dict[str, Any], sums: Float64[np.ndarray, "..."]) -> bytes:
    """An .npz of numbers alone: nothing is pickled, here or by vLLM."""
    file = io.BytesIO()
    text = np.frombuffer(json.dumps(about).encode(), np.uint8)
    np.savez(file, allow_pickle=False, about=text, sums=sums)
    return file.getvalue()


def _rule_of(impl: Any) -> AttentionRule:
    """The attention of one of vLLM's implementations, whose window includes the query itself."""
    window = impl.sliding_window
    return make_rule(
        head_dim=impl.head_size, is_causal=True, near=(window - 1, 0) if window > 0 else None,
        scale=impl.scale, softcap=impl.logits_soft_cap or None,
    )  # fmt: skip


class WorkerCalls:
    """The call of a worker, for an engine in a process of its own.

    `LLM(..., worker_extension_cls="headwise.vllm.WorkerCalls")` is vLLM's way to add calls.
    """

    def headwise_record(self, options: Options | None, close: bool) -> bytes:
        """Begin to record, if there are options; end it, if `close`. Returns the requests so far.

        An error is returned by its type and message: it would lose its type on the way.
        """
        worker: Any = getattr(self, "worker", self)  # vLLM passes functions the wrapper around it
        try:
            if options is not None:
                worker.headwise_recorder = RequestRecorder(worker, options)
        except HeadwiseError as error:
            about = {"error": type(error).__name__, "message": str(error)}
            return _packed(about, np.zeros(0))
        recorder: RequestRecorder = worker.headwise_recorder
        if close:
            recorder.close()
            del worker.headwise_recorder
        return recorder.take()


TESTED = ("0.32",)  # minor versions


def layers_of(worker: Any, numbers: Collection[int] | None) -> tuple[str, dict[int, Any]]:
    """The version of vLLM, and the attention layers to watch by number, each of them checked."""
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


# A server that was asked for it writes a JSON line for each request that ends.


def write_lines(text: str) -> None:
    """Let each worker of this process write lines, once it has its pages.

    vLLM calls plugins in each of its processes, and may call them twice.
    """
    options = server_options(text)  # so that a server with a wrong option does not start
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    # The first moment at which a worker has its pages; vLLM has no hook there.
    initialize = WorkerWrapperBase.initialize_from_config

    def initialize_and_record(self: Any, configs: list[Any]) -> None:
        initialize(self, configs)
        recorder = RequestRecorder(self.worker, options)
        recorder.on_end = line_writer(options["path"], recorder)

    if initialize.__name__ != initialize_and_record.__name__:
        WorkerWrapperBase.initialize_from_config = initialize_and_record


def line_writer(path: str, recorder: Any) -> Callable[[Sent], None]:
    """What appends a line for each request to a file.

    A disk that is full must not stop the engine: lines that were lost are counted in the next one.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = os.open(path, flags, 0o600)
    except OSError as error:
        raise OutputError(
            f"HEADWISE_VLLM: {path} cannot be appended to ({error.strerror})."
        ) from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OutputError(f"HEADWISE_VLLM: {path} is not a file. Name a file, or a new one.")
    lost = 0

    def write(request: Sent) -> None:
        nonlocal lost
        line = request_line(request, recorder) | ({"lost": lost} if lost else {})
        data = json.dumps(line).encode() + b"\n"
        try:
            is_written = os.write(file, data) == len(data)
        except OSError:
            is_written = False
        lost = 0 if is_written else lost + 1

    return write


def request_line(request: Sent, recorder: Any) -> dict[str, Any]:
    """What is written about a request: the means of each head, by phase and statistic."""
    about, sums = request
    line = {name: about[name] for name in ("request", "queries", "tokens")}
    if about["problem"]:
        line["problem"] = about["problem"]
    total, count, *_ = np.moveaxis(sums, (3, 2), (0, 2))  # phases statistics heads
    for phase, totals, counts in zip(PHASES, total, count, strict=True):
        line[phase] = {
            statistic: dict(zip(recorder.about["heads"], np.round(x / n, 5).tolist(), strict=True))
            for statistic, x, n in zip(recorder.statistics, totals, counts, strict=True)
            if n.all()
        }
    return line
