"""An interrupt at any line leaves a model as it was: no hook, no mode, no setting stays."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
import zoo
from torch import Tensor, nn

import headwise as hw
from headwise._interrupts import reversible
from headwise.models import find_attentions, gate_heads, hooked, in_evaluation
from headwise.monitor import HeadMonitor
from interrupting import Interrupts
from oracles import modules_of

IDS = torch.tensor([[1, 2, 3, 4]])
X = torch.randn(1, 4, 12, generator=torch.Generator().manual_seed(0))


class Written(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 3)).permute(2, 0, 3, 1, 4)
        return self.out(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Fused(Written):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 3)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "interface": (lambda: zoo.make("Bert"), IDS),
    "ours": (lambda: hw.MultiHeadAttention(12, 4), X),
    "fused": (Fused, X),
    "written out": (Written, X),
    "torch": (lambda: nn.TransformerEncoderLayer(12, 3, 16, batch_first=True).eval(), X),
}


def _observe(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad(), hw.observe(model):
        pass


def _ablate(model: nn.Module, x: Tensor) -> None:
    with hw.ablate(model, "L0.H1"):
        pass


def _gates(model: nn.Module, x: Tensor) -> None:
    with in_evaluation(model), gate_heads(model, find_attentions(model, x), lambda _: None):
        pass


def _monitor(model: nn.Module, x: Tensor) -> None:
    model.train()
    try:
        with HeadMonitor(model, every=1) as monitor:
            model(x)
            monitor.step()
    finally:
        model.eval()


def _importance(model: nn.Module, x: Tensor) -> None:
    hw.importance(model, [{"input_ids": x}], method="gradient", loss=_loss)


def _loss(output: Any, batch: Any) -> Tensor:
    return output[0].square().mean((1, 2))


def _state(model: nn.Module) -> dict[str, object]:
    modules = modules_of(model)
    return modules | {
        "interface": transformers.AttentionInterface.get_interface,
        "modes": torch._C._len_torch_function_stack(),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "compiler": torch.compiler._stance if hasattr(torch.compiler, "_stance") else None,
        "training": [module.training for module in model.modules()],
        "gradients": [weight.requires_grad for weight in model.parameters()],
        "SIGINT": signal.getsignal(signal.SIGINT),
    }


FILES = ("/models/", "/watch/_watch", "_interrupts", "/gauge/_still", "/monitor/_w", "/monitor/_m")


def _check(work: Callable[[nn.Module, Tensor], None], model: nn.Module, x: Tensor) -> int:
    def answer() -> Tensor:
        with torch.no_grad():
            given = model(x)
        return given if isinstance(given, Tensor) else given[0]

    work(model, x)  # what is made once in a process is made
    expected, before = answer(), _state(model)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    count = Interrupts(None, files=FILES)
    assert not count.run(lambda: work(model, x))
    for at in range(count.lines):
        interrupts = Interrupts(at, files=FILES)
        assert interrupts.run(lambda: work(model, x)), f"{at}: swallowed at {interrupts.where}"
        after = _state(model)
        gone = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
        assert not gone, f"{at}: {sorted(gone)[:4]} after an interrupt at {interrupts.where}"
        assert torch.equal(answer(), expected), interrupts.where
    return count.lines


WORK = {"observe": _observe, "ablate": _ablate, "gates": _gates, "monitor": _monitor}


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("name", MODELS)
def test_an_interrupt_at_any_line_leaves_the_model_as_it_was(name: str, work: str) -> None:
    make, x = MODELS[name]
    torch.manual_seed(0)
    lines = _check(WORK[work], make().eval(), x)
    print(name, work, lines)
    assert lines > 100
