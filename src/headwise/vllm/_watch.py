"""Watch an `LLM` of vLLM: the tables of its requests."""

import io
import json
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import numpy as np
from jaxtyping import Float64

from headwise._packages import require
from headwise.errors import ArgumentError, UnsupportedError
from headwise.tables import Head, HeadsLike, HeadTable, Totals
from headwise.vllm._options import make_options
from headwise.vllm._pages import Sums
from headwise.vllm._plugin import raise_error, start, take
from headwise.vllm._positions import PHASES
from headwise.watch import Request

# Of these, uniform attention has no value.
_NO_EVEN = ("max_logit", "lse", "sink")


@contextmanager
def watch(
    llm: Any,
    request: Request | None = None,
    *,
    every: int = 16,
    layers: Collection[int] | None = None,
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
    call = _caller(llm)
    header = json.loads(call("headwise_start", start, options))
    raise_error(header)
    served = ServedWatch(request or Request(), options, header, call)
    try:
        yield served
    finally:
        served.fetch(close=True)


def _caller(llm: Any) -> Callable[..., Any]:
    """What calls the worker: by a function in the same process, else by name: none is pickled.

    Raises:
        ArgumentError: it is no LLM.
        UnsupportedError: the engine has a process of its own, without our calls.
    """
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

    def call(name: str, function: Callable[..., Any], argument: Any) -> Any:
        return llm.collective_rpc(function if is_here else name, args=(argument,))[0]

    return call


class ServedWatch:
    """The statistics of served requests so far; made by `watch`."""

    def __init__(
        self, request: Request, options: dict[str, Any], header: dict[str, Any], call: Any
    ) -> None:
        self._request, self._options, self._header, self._call = request, options, header, call
        self._about: dict[str, dict[str, Any]] = {}  # by vLLM's own name of a request
        self._sums: dict[str, Sums] = {}
        self._is_open = True

    def __repr__(self) -> str:
        return f"ServedWatch of {len(self._about)} requests"

    def fetch(self, close: bool = False) -> None:
        """Fetch what was recorded since the last time; `table` does."""
        if not self._is_open:
            return
        self._is_open = not close
        with np.load(
            io.BytesIO(self._call("headwise_take", take, close)), allow_pickle=False
        ) as file:
            for number, about in enumerate(json.loads(bytes(file["about"]))):
                self._about[about["name"]] = about
                self._sums[about["name"]] = Sums(*(file[name][number] for name in Sums._fields))

    @property
    def requests(self) -> list[str]:
        """The names of the requests so far, as vLLM's outputs have them in `request_id`."""
        self.fetch()
        return list(dict.fromkeys(about["request"] for about in self._about.values()))

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
        chosen = [a for a in self._about.values() if request in (None, a["request"])]
        for about in chosen:
            if about["problem"]:
                raise ArgumentError(f"ServedWatch.table: {about['request']}: {about['problem']}")
        phases = [number for number, name in enumerate(PHASES) if phase in (None, name)]
        heads = tuple(Head.parse(name) for name in self._header["heads"])
        counted = [
            sum(about[part][number] for about in chosen for number in phases)
            for part in ("queries", "tokens")
        ]
        return HeadTable(
            heads=heads,
            kv_heads=np.array(self._header["kv_heads"], np.int64),
            totals={name: self._totals(name, chosen, phases) for name in self._request.names},
            covered=np.repeat(np.array(counted, np.float64)[:, None], len(heads), 1),
            model=self._header["model"],
            versions={"headwise": version("headwise"), "vllm": self._header["vllm"]},
        )

    def _totals(self, name: str, chosen: list[dict[str, Any]], phases: list[int]) -> Totals:
        """The totals of one statistic; each request is a text."""
        shape = len(chosen), len(phases), len(self._header["heads"])
        if name in self._options["statistics"]:
            column = self._options["statistics"].index(name)
            by_part = {
                part: np.stack(
                    [getattr(self._sums[a["name"]], part)[phases, :, column] for a in chosen]
                )
                for part in Sums._fields
            }
        else:  # no row of a causal model without sinks is eligible
            by_part = dict.fromkeys(Sums._fields, np.zeros(shape))
            by_part["maximum"] = np.full(shape, np.nan)
        even = by_part["even"].sum(1)
        return Totals.of_texts(
            by_part["total"].sum(1),
            by_part["count"].sum(1),
            _largest(by_part["maximum"]),
            np.full_like(even, np.nan) if name in _NO_EVEN else even,
            keep=self._request.per_text,
        )


def _largest(values: Float64[np.ndarray, "M phases N"]) -> Float64[np.ndarray, " N"]:
    """The maximum over requests and phases; NaN where no row counts."""
    return np.fmax.reduce(values.reshape(-1, values.shape[-1]))
