"""An interrupt at any line leaves the model unchanged: hooks, modes and settings."""

import signal
import subprocess
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
from headwise._evaluation import in_evaluation
from headwise._interrupts import reversible
from headwise.models import find_attentions, gate_heads, hooked
from headwise.monitor import HeadMonitor
from interrupting import Interrupts
from oracles import modules_of

IDS = torch.tensor([[1, 2, 3, 4]])
X = torch.randn(1, 4, 12, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Python's own handler of SIGINT, which shells set to be ignored in background jobs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class ProjectedHandwrittenAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out_proj = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 3)).permute(2, 0, 3, 1, 4)
        return self.out_proj(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


class ProjectedFusedAttention(ProjectedHandwrittenAttention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 3)).permute(2, 0, 3, 1, 4)
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "interface": (lambda: zoo.make("Bert"), IDS),
    "ours": (lambda: hw.MultiHeadAttention(12, 4), X),
    "fused": (lambda: nn.Sequential(ProjectedFusedAttention()), X),
    "written out": (lambda: nn.Sequential(ProjectedHandwrittenAttention()), X),
    "torch": (lambda: nn.TransformerEncoderLayer(12, 3, 16, batch_first=True).eval(), X),
}


def _observe(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad(), hw.observe(model):
        pass


def _ablate(model: nn.Module, x: Tensor) -> None:
    with hw.ablate(model, "L0.H1", mode="mean", reference=[x]):
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


FILES = ("/models/", "/watch/_watch", "_interrupts", "/_evaluation", "/monitor/_w", "/monitor/_m")


def _check(
    work: Callable[[nn.Module, Tensor], None], model: nn.Module, x: Tensor, step: int
) -> int:
    """Interrupt the work at every so many lines, and return how many lines it has."""

    def answer() -> Tensor:
        with torch.no_grad():
            output = model(x)
        return output if isinstance(output, Tensor) else output[0]

    work(model, x)  # warm up what is created once per process
    expected, before = answer(), _state(model)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    count = Interrupts(None, files=FILES)
    assert not count.run(lambda: work(model, x))
    for line in range(0, count.lines, step):
        interrupts = Interrupts(line, files=FILES)
        assert interrupts.run(lambda: work(model, x)), f"{line}: swallowed at {interrupts.where}"
        after = _state(model)
        gone = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
        assert not gone, f"{line}: {sorted(gone)[:4]} after an interrupt at {interrupts.where}"
        assert torch.equal(answer(), expected), interrupts.where
    return count.lines


WORK = {"observe": _observe, "ablate": _ablate, "gates": _gates, "monitor": _monitor}


def _cases() -> Iterator[Any]:
    """Every kind of model observed, and two of them in every block; the usual run has one case.

    Observing is interrupted at every line. The other blocks capture calls by the same lines, so
    every third line is enough for them, and for the usual run.
    """
    for name in MODELS:
        for work in WORK:
            if work == "observe" or name in ("interface", "torch"):
                usual = (name, work) == ("ours", "observe")
                yield pytest.param(name, work, marks=() if usual else pytest.mark.full)


@pytest.mark.parametrize(("name", "work"), [*_cases()])
def test_an_interrupt_at_any_line_leaves_the_model_as_it_was(name: str, work: str) -> None:
    make, x = MODELS[name]
    torch.manual_seed(0)
    step = 1 if work == "observe" and name != "ours" else 3
    assert _check(WORK[work], make().eval(), x, step) > 100


@reversible
def _changed(model: nn.Module) -> Iterator[None]:
    model.changed = True
    try:
        yield
    finally:
        del model.changed


def test_a_custom_interrupt_handler_is_kept() -> None:
    model, received = nn.Linear(2, 2), []

    def theirs(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = signal.signal(signal.SIGINT, theirs)
    try:
        with _changed(model):
            signal.raise_signal(signal.SIGINT)
            assert received == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is theirs
        with _changed(model):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        with _changed(model):
            signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert received == [signal.SIGINT]


def test_a_block_is_interrupted_at_once() -> None:
    model = nn.Linear(2, 2)
    done = False
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012, SIM117
        with _changed(model):
            signal.raise_signal(signal.SIGINT)
            done = True
    assert not done
    assert not hasattr(model, "changed")


def test_other_threads_set_no_handler() -> None:
    model, results = nn.Linear(2, 2), []

    def work() -> None:
        with _changed(model):
            results.append((model.changed, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [(True, signal.default_int_handler)]
    assert not hasattr(model, "changed")


def test_a_hook_that_is_left_behind_does_nothing() -> None:
    layer, calls = nn.Linear(2, 2), []
    with hooked(before=[(layer, lambda *_: calls.append("before"))]):
        layer(torch.ones(2))
        hooks = dict(layer._forward_pre_hooks)
    layer._forward_pre_hooks.update(hooks)
    layer(torch.ones(2))
    assert calls == ["before"]


def test_what_is_still_open_at_the_end_of_python_is_closed() -> None:
    script = """
import sys
import headwise as hw
from headwise._interrupts import reversible

@reversible
def changed(name):
    try:
        yield
    finally:
        print(name, "undone")

@reversible
def both():
    with changed("inner"):
        yield
    print("never here")

sys.kept = both(), changed("second")  # outlives all modules
for context in sys.kept:
    context.__enter__()
sys.monitor = hw.HeadMonitor(hw.MultiHeadAttention(8, 2))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("inner undone\nsecond undone\n", "")
