"""An interrupt (Ctrl-C) inside a block restores the model and all that was replaced for it."""

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress

import pytest
import torch
import torch.nn.functional as F
import transformers
import zoo
from torch import Tensor, nn

import headwise as hw
from gates import gate_heads
from headwise._evaluation import in_evaluation
from headwise.models import hooked
from headwise.monitor import HeadMonitor
from headwise.ownership import find_attentions
from oracles import first_tensor, modules_of
from small_attention import SmallAttention

IDS = torch.tensor([[1, 2, 3, 4]])
X = torch.randn(1, 4, 12, generator=torch.Generator().manual_seed(0))


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "interface": (lambda: zoo.make("Bert"), IDS),
    "ours": (lambda: hw.MultiHeadAttention(12, 4), X),
    "fused": (lambda: nn.Sequential(SmallAttention()), X),
    "written out": (lambda: nn.Sequential(SmallAttention(by_hand=True)), X),
    "torch": (lambda: nn.TransformerEncoderLayer(12, 3, 16, batch_first=True).eval(), X),
}


@contextmanager
def _observed(model: nn.Module, x: Tensor) -> Iterator[None]:
    with torch.no_grad(), hw.observe(model):
        yield


@contextmanager
def _gated(model: nn.Module, x: Tensor) -> Iterator[None]:
    with in_evaluation(model), gate_heads(model, find_attentions(model, x), lambda _: None):
        yield


@contextmanager
def _monitored(model: nn.Module, x: Tensor) -> Iterator[None]:
    model.train()
    try:
        with HeadMonitor(model, every=1):
            yield
    finally:
        model.eval()


def _ablated(model: nn.Module, x: Tensor) -> AbstractContextManager[object]:
    return hw.ablate(model, "L0.H1", mode="mean", reference=[x])


BLOCKS: dict[str, Callable[[nn.Module, Tensor], AbstractContextManager[object]]] = {
    "observe": _observed,
    "ablate": _ablated,
    "gates": _gated,
    "monitor": _monitored,
    "fast attention": lambda model, _: hw.fast_attention(model),
}


def _state(model: nn.Module) -> dict[str, object]:
    modules = modules_of(model)
    return modules | {
        "interface": transformers.AttentionInterface.get_interface,
        "function": F.scaled_dot_product_attention,
        "modes": torch._C._len_torch_function_stack(),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "compiler": torch._dynamo.eval_frame._stance,
        "training": [module.training for module in model.modules()],
        "gradients": [weight.requires_grad for weight in model.parameters()],
    }


def _changes(model: nn.Module, before: dict[str, object]) -> list[str]:
    after = _state(model)
    return sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))


def _answer(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return first_tensor(model(x))


# Blocks but watching stand on the same captures: one kind of models is enough for each.
CASES = [(name, "observe") for name in MODELS]
CASES += [("torch", "ablate"), ("interface", "gates"), ("torch", "monitor")]
CASES += [("fused", "fast attention")]


@pytest.mark.parametrize(("name", "block"), CASES)
def test_an_interrupt_inside_a_block_restores_everything(name: str, block: str) -> None:
    """It comes before the attention, between its calls, and after it."""
    make, x = MODELS[name]
    torch.manual_seed(0)
    model, open_block = make().eval(), BLOCKS[block]

    def run(interrupted: nn.Module | None) -> None:
        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        with open_block(model, x), torch.set_grad_enabled(block == "monitor"), ExitStack() as stack:
            if interrupted is not None:
                stack.callback(interrupted.register_forward_hook(interrupt).remove)
            model(x)

    run(None)  # makes what is made once in a process
    expected, before = _answer(model, x), _state(model)
    modules = [module for module in model.modules() if not isinstance(module, nn.ModuleList)]
    for interrupted in (modules[0], modules[len(modules) // 2], modules[-1]):
        with suppress(KeyboardInterrupt):  # a fast path of PyTorch calls no inner module
            run(interrupted)
        if block == "monitor":  # which enters and leaves a block in each pass
            gc.collect()
            with hw.observe(model):
                pass
        assert not _changes(model, before)
        assert torch.equal(_answer(model, x), expected)


def test_a_hook_that_is_left_behind_does_nothing() -> None:
    layer, calls = nn.Linear(2, 2), []
    with hooked(before=[(layer, lambda *_: calls.append("before"))]):
        layer(torch.ones(2))
        hooks = dict(layer._forward_pre_hooks)
    layer._forward_pre_hooks.update(hooks)
    layer(torch.ones(2))
    assert calls == ["before"]


def test_a_monitor_that_is_dropped_is_closed() -> None:
    layer = hw.MultiHeadAttention(8, 2)
    before = _state(layer)
    HeadMonitor(layer)
    assert not _changes(layer, before)


@pytest.mark.full
def test_a_monitor_that_is_left_open_at_the_end_of_python_is_closed() -> None:
    script = "import sys, headwise as hw; sys.kept = hw.HeadMonitor(hw.MultiHeadAttention(8, 2))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
