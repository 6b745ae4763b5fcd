"""Every head of a model that vLLM serves (experimental, on CPUs).

`watch` observes an `LLM`; a server that starts with the environment variable `HEADWISE_VLLM`
writes a line for each request. Until either, nothing of vLLM is changed.

vLLM imports this package in each of its processes, so it imports its parts on first use.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwise.vllm._options import spans as spans
    from headwise.vllm._recorder import WorkerCalls as WorkerCalls
    from headwise.vllm._watch import ServedWatch as ServedWatch
    from headwise.vllm._watch import watch as watch

_HOME = {
    "ServedWatch": "_watch",
    "WorkerCalls": "_recorder",
    "spans": "_options",
    "watch": "_watch",
}
__all__ = ["register", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'headwise.vllm' has no attribute {name!r}")
    return getattr(import_module(f"headwise.vllm.{_HOME[name]}"), name)


def register() -> None:
    """The entry point `vllm.general_plugins`: a server that was asked for writes its lines."""
    if "HEADWISE_VLLM" in os.environ:
        from headwise.vllm._recorder import write_lines

        write_lines(os.environ["HEADWISE_VLLM"])
