"""Watch an `LLM` of vLLM: the tables of its requests."""

import io
import json
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, SupportsIndex

import numpy as np
from jaxtyping import Float64

from headwise import errors
from headwise._extras import require
from headwise.errors import ArgumentError, UnsupportedError
from headwise.kernels.pages import NOTHING
from headwise.tables import Head, HeadsLike, HeadTable, Totals
from headwise.vllm._options import PHASES, Options, make_options
from headwise.vllm._recorder import Sent, WorkerCalls
from headwise.watch import Request


@contextmanager
def watch(
    llm: Any,
    request: Request | None = None,
    *,
    every: SupportsIndex = 16,
    layers: Collection[SupportsIndex] | None = None,
    heads: HeadsLike | str | os.PathLike[str] | None = None,
    exact: bool = True,
) -> Iterator["ServedWatch"]:
    """Watch the heads of a model that vLLM serves while the block runs, for each request.

    A query counts once, by its position in its request, whatever chunks, batches and preemptions
    do; those that vLLM finds in its prefix cache are not computed, and lower the `coverage`. Tables
    equal those of `observe` on the same tokens. vLLM computes its answers as before.

    An engine in a process of its own, which is vLLM's default, needs
    `LLM(..., worker_extension_cls="headwise.vllm.WorkerCalls")`.

    Args:
        llm: A `vllm.LLM`, on a CPU.
        request: The statistics, and the names of spans; see `spans` for those of a request.
        every: Count the queries at multiples of this position, and the last of the prompt.
        layers: The layers to watch. None is all of them.
        heads: The heads to keep, in any form, or the path of a head file. None is all of them.
        exact: False lets our kernel answer whole prompts too, from the pass that computes their
            statistics: equal up to rounding.
    Yields:
        The watch; its tables can be read during the block and after it.
    Raises:
        ArgumentError: an argument is invalid, or a layer does not exist.
        HeadError: a head does not exist.
        UnsupportedError: the request or the engine has something that cannot be served exactly.
        MissingPackageError: vLLM is not installed.
    """
    require("vllm", "vllm", "vllm.watch")
    options = make_options(request, every, layers, heads, exact)
    served = ServedWatch(request or Request(), options, _caller(llm))
    try:
        yield served
    finally:
        served.fetch(close=True)


def _caller(llm: Any) -> Callable[[Options | None, bool], bytes]:
    """What calls the worker: a function in the same process, else a name; nothing is pickled."""
    from vllm import LLM
    from vllm.v1.engine.core_client import InprocClient
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    if not isinstance(llm, LLM):
        raise ArgumentError(f"vllm.watch: llm is {type(llm).__name__}. Give a vllm.LLM.")
    engine = llm.llm_engine.engine_core
    is_here = isinstance(engine, InprocClient) and isinstance(
        engine.engine_core.model_executor, UniProcExecutor
    )
    extension = llm.llm_engine.vllm_config.parallel_config.worker_extension_cls
    if not is_here and extension != "headwise.vllm.WorkerCalls":
        raise UnsupportedError(
            "vllm.watch: the engine runs in a process of its own. Make it with "
            'LLM(..., worker_extension_cls="headwise.vllm.WorkerCalls"), or in this process with '
            "the environment variable VLLM_ENABLE_V1_MULTIPROCESSING=0."
        )
    method = WorkerCalls.headwise_record if is_here else "headwise_record"
    return lambda *args: llm.collective_rpc(method, args=args)[0]


class ServedWatch:
    """The statistics of served requests so far; made by `watch`."""

    def __init__(
        self, request: Request, options: Options, call: Callable[[Options | None, bool], bytes]
    ) -> None:
        self._request, self._statistics, self._call = request, options["statistics"], call
        self._is_open = True
        self._about: dict[str, Any] = {}  # what holds for all requests
        self._requests: dict[str, Sent] = {}  # by vLLM's own name
        self.fetch(options)

    def __repr__(self) -> str:
        return f"ServedWatch of {len(self._requests)} requests"

    def fetch(self, options: Options | None = None, close: bool = False) -> None:
        """Fetch what was recorded since the last time; `table` does."""
        if not self._is_open:
            return
        self._is_open = not close
        data = io.BytesIO(self._call(options, close))
        with np.load(data, allow_pickle=False) as file:
            self._about, all_sums = json.loads(bytes(file["about"])), file["sums"]
        if "error" in self._about:
            raise getattr(errors, self._about["error"])(self._about["message"])
        for about, sums in zip(self._about["requests"], all_sums, strict=True):
            self._requests[about["name"]] = about, sums

    @property
    def requests(self) -> list[str]:
        """The names of the requests so far, as vLLM's outputs have them in `request_id`."""
        self.fetch()
        return list(dict.fromkeys(about["request"] for about, _ in self._requests.values()))

    def table(self, request: str | None = None, phase: str | None = None) -> HeadTable:
        """The statistics of one request, or of all of them.

        Args:
            request: The `request_id` of vLLM's output. None is all requests.
            phase: "prefill" or "decode". None is both.
        Raises:
            ArgumentError: there is no such request or phase, none was watched, or a request named
                spans that cannot be read.
        """
        known = self.requests
        if request is not None and request not in known:
            raise ArgumentError(
                f"ServedWatch.table: request={request!r}. There are {', '.join(known) or 'none'}."
            )
        if not known or phase not in (None, *PHASES):
            raise ArgumentError(
                f"ServedWatch.table: phase={phase!r} of {len(known)} requests. Generate something "
                f"in the block, and name one of {', '.join(PHASES)}."
            )
        chosen = [sent for sent in self._requests.values() if request in (None, sent[0]["request"])]
        for about, _ in chosen:
            if about["problem"]:
                raise ArgumentError(f"ServedWatch.table: {about['request']}: {about['problem']}")
        phases = [number for number, name in enumerate(PHASES) if phase in (None, name)]
        sums = np.stack([sums[phases] for _, sums in chosen])
        by_name = dict(zip(self._statistics, np.moveaxis(sums, 3, 0), strict=True))
        # No row of a causal model without sinks is eligible for the others.
        empty = np.broadcast_to(NOTHING, (*sums.shape[:3], 4))
        counted = [
            sum(about[part][number] for about, _ in chosen for number in phases)
            for part in ("queries", "tokens")
        ]
        heads = tuple(Head.parse(name) for name in self._about["heads"])
        return HeadTable(
            heads=heads,
            kv_heads=np.array(self._about["kv_heads"], np.int64),
            totals={name: self._totals(by_name.get(name, empty)) for name in self._request.names},
            covered=np.repeat(np.array(counted, np.float64)[:, None], len(heads), 1),
            model=self._about["model"],
            versions={"headwise": version("headwise"), "vllm": self._about["vllm"]},
        )

    def _totals(self, sums: Float64[np.ndarray, "requests phases heads 4"]) -> Totals:
        """The totals of one statistic; each request is a text."""
        total, count, uniform = np.moveaxis(sums[..., :3].sum(1), -1, 0)
        largest = np.fmax.reduce(sums[..., 3], (0, 1))
        return Totals.of_texts(total, count, largest, uniform, keep=self._request.per_text)
