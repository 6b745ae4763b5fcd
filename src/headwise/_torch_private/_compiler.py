"""The compiler of torch, which the first use of `torch.compile` or of an optimizer imports."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import CodeType, ModuleType
from typing import Any, ParamSpec, TypeVar

from headwise._torch_private._names import required

Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")

_COMPILER = "torch._dynamo"


def is_compiler_loaded() -> bool:
    """Whether anything may have been compiled."""
    return _COMPILER in sys.modules


def is_of_graph(code: CodeType | None) -> bool:
    """Whether code is what torch has made of a graph."""
    return code is not None and code.co_filename.startswith("<eval_with_key>")


def side_effects_under_checkpoint() -> AbstractContextManager[None]:
    """A context in which code under gradient checkpointing may change objects as it is compiled.

    The compiler refuses that otherwise: the backward pass, which runs the code again, leaves such
    changes out.
    """
    config: Any = sys.modules[_COMPILER].config
    name = "skip_fwd_side_effects_in_bwd_under_checkpoint"
    context: AbstractContextManager[None] = (
        config.patch(**{name: True}) if hasattr(config, name) else nullcontext()
    )
    return context


def excuse_uncompiled_call() -> None:
    """Let a function that is compiled as a whole graph have run uncompiled in the call that runs.

    When it returns, it complains otherwise where code may be compiled again by then.
    """
    functions = sys.modules[_COMPILER].eval_frame
    count_frames = getattr(functions, "set_fullgraph_compiled_frame_count", None)
    if count_frames is not None and count_frames(-1) >= 0:  # such a function runs
        count_frames(1)


def compiler_stance() -> Any:
    """How compiled code runs; None before the compiler is imported."""
    compiler = sys.modules.get(_COMPILER)
    return None if compiler is None else required(compiler.eval_frame, "_stance")


def set_compiler_stance(stance: Any) -> None:
    """Let compiled code run by a stance, or by the one of this name.

    Before the compiler is imported nothing is compiled, and to import it takes 2.5 s. So the stance
    waits for the first function that is compiled.
    """
    _waiting.stance = stance
    compiler = sys.modules.get(_COMPILER)
    if compiler is not None:
        frames = compiler.eval_frame
        is_named = stance is None or isinstance(stance, str)
        stance = frames.DynamoStance(stance or "default") if is_named else stance
        required(frames, "_set_stance")(stance)
        return
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not _waiting]
    if stance is not None:
        sys.meta_path.insert(0, _waiting)


class _Waiting(MetaPathFinder):
    """Sets a stance as soon as the compiler is imported."""

    stance: Any = None

    def find_spec(
        self, name: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == _COMPILER else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_set(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:  # or the block has ended meanwhile
                    sys.meta_path.remove(self)
                    set_compiler_stance(self.stance)

            setattr(spec.loader, "exec_module", execute_and_set)  # noqa: B010 - of this import alone
        return spec


_waiting = _Waiting()


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Compile nothing that this thread runs in the block, even within compiled code."""
    compiler = sys.modules.get(_COMPILER)
    if compiler is None:
        yield
        return
    set_callback = required(compiler.eval_frame, "set_eval_frame")
    callback = set_callback(None)
    try:
        yield
    finally:
        set_callback(callback)


def uncompiled_block(
    block: Callable[Arguments, Iterator[Value]],
) -> Callable[Arguments, AbstractContextManager[Value]]:
    """What `contextmanager` makes of a generator; within a compiled function, nothing of it and
    nothing in the block is compiled."""

    @contextmanager
    @wraps(block)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Iterator[Value]:
        with _without_compiler(), contextmanager(block)(*args, **kwargs) as value:
            yield value

    # As `torch.compiler.disable` does, which imports the compiler.
    reason = "watch or edit heads outside of what is compiled"
    run.__dict__.update(_torchdynamo_disable=True, _torchdynamo_disable_msg=reason)
    return run
