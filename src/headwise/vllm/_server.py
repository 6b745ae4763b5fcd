"""A server that was asked for it writes a JSON line for each request that ends."""

import json
import os
import stat
from collections.abc import Callable
from typing import Any

import numpy as np

from headwise.errors import OutputError
from headwise.vllm._options import PHASES, server_options
from headwise.vllm._recorder import RequestRecorder, Sent


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
