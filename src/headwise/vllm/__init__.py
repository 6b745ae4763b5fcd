"""Every head of a model that vLLM serves (experimental, on CPUs).

`watch` observes an `LLM`; a server that starts with the environment variable `HEADWISE_VLLM`
writes a line for each request. Until either, nothing of vLLM is changed: its entry point
`vllm.general_plugins` calls `register`, which only reads that variable.

vLLM imports this package in each of its processes, so it imports its parts on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwise.vllm._plugin import WorkerCalls as WorkerCalls
    from headwise.vllm._plugin import register as register
    from headwise.vllm._positions import spans as spans
    from headwise.vllm._watch import ServedWatch as ServedWatch
    from headwise.vllm._watch import watch as watch

_HOME = {
    "ServedWatch": "_watch",
    "WorkerCalls": "_plugin",
    "register": "_plugin",
    "spans": "_positions",
    "watch": "_watch",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'headwise.vllm' has no attribute {name!r}")
    return getattr(import_module(f"headwise.vllm.{_HOME[name]}"), name)
