"""What runs in vLLM's processes: the entry point, the calls of a worker, and a server's lines."""

import json
import os
import stat
from collections.abc import Callable
from typing import Any

import numpy as np

from headwise import errors
from headwise.errors import HeadwiseError, OutputError
from headwise.vllm._options import Options, server_options
from headwise.vllm._positions import PHASES
from headwise.vllm._recorder import Recorded, RequestRecorder

SWITCH = "HEADWISE_VLLM"
# The recorder of each worker of this process, by its identity.
_RECORDERS: dict[int, RequestRecorder] = {}


class WorkerCalls:
    """Calls of a worker, for an engine in a process of its own.

    `LLM(..., worker_extension_cls="headwise.vllm.WorkerCalls")` is vLLM's way to add calls.
    """

    def headwise_start(self, options: Options) -> str:
        """Begin to record: what holds for all requests, as JSON, or the error."""
        return start(self, options)

    def headwise_take(self, close: bool) -> bytes:
        """The requests so far."""
        return take(self, close)


def start(worker: Any, options: Options) -> str:
    """Begin to record in a worker.

    Returns:
        What holds for all requests, as JSON; or the type and message of an error, which would
        lose its type on the way to another process.
    """
    try:
        recorder = _RECORDERS[id(_inner(worker))] = RequestRecorder(_inner(worker), options)
        return json.dumps(recorder.header())
    except HeadwiseError as error:
        return json.dumps({"error": type(error).__name__, "message": str(error)})


def take(worker: Any, close: bool) -> bytes:
    """The requests so far, as arrays; `close` ends the recording."""
    recorder = _RECORDERS[id(_inner(worker))]
    if close:
        recorder.close()
        del _RECORDERS[id(_inner(worker))]
    return recorder.take()


def raise_error(header: dict[str, Any]) -> None:
    """Raise the error that `start` has returned, if any.

    Raises:
        HeadwiseError: of its type.
    """
    if "error" in header:
        raise getattr(errors, header["error"])(header["message"])


def _inner(worker: Any) -> Any:
    """The worker itself: vLLM passes functions the wrapper around it."""
    return getattr(worker, "worker", worker)


def register() -> None:
    """The entry point `vllm.general_plugins`: a server that was asked for writes its lines.

    vLLM calls it in each of its processes. It changes nothing unless `HEADWISE_VLLM` is set.
    """
    text = os.environ.get(SWITCH)
    if text is None:
        return
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


def line_writer(path: str, recorder: Any) -> Callable[[Recorded], None]:
    """What appends a line for each request to a file.

    A disk that is full must not stop the engine: lines that were lost are counted in the next one.

    Raises:
        OutputError: the file cannot be opened, or is none: a link or a device might be a trap.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = os.open(path, flags, 0o600)
    except OSError as error:
        raise OutputError(f"{SWITCH}: {path} cannot be appended to ({error.strerror}).") from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OutputError(f"{SWITCH}: {path} is not a file. Name a file, or a new one.")
    names, statistics = [str(head) for head in recorder.heads], recorder.statistics
    lost = 0

    def write(record: Recorded) -> None:
        nonlocal lost
        line = request_line(record, names, statistics) | ({"lost": lost} if lost else {})
        data = json.dumps(line).encode() + b"\n"
        try:
            is_written = os.write(file, data) == len(data)
        except OSError:
            is_written = False
        lost = 0 if is_written else lost + 1

    return write


def request_line(record: Recorded, heads: list[str], statistics: tuple[str, ...]) -> dict[str, Any]:
    """What is written about a request: the means of each head, by phase and statistic."""
    about, sums = record
    line: dict[str, Any] = {name: about[name] for name in ("request", "queries", "tokens")}
    if about["problem"]:
        line["problem"] = about["problem"]
    for number, phase in enumerate(PHASES):
        count, total = sums.count[number], sums.total[number]
        line[phase] = {
            statistic: dict(
                zip(heads, np.round(total[:, k] / count[:, k], 5).tolist(), strict=True)
            )
            for k, statistic in enumerate(statistics)
            if count[:, k].all()
        }
    return line
