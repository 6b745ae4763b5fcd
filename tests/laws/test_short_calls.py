"""Short calls: what was looked into once is not looked into again, and is what it was."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from jaxtyping import config
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from headwise._native_library import library
from headwise._torch_private import eager_outline
from headwise.errors import ArgumentError
from headwise.kernels import RowRequest, _attend, attend, make_rule, row_statistics

native = pytest.mark.skipif(not library(), reason=f"no native kernel: {library().why}")
RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (3, 1)},
    "scaled": {"scale": 0.3},
}
each_rule = pytest.mark.parametrize("how", RULES.values(), ids=RULES)
each_backend = pytest.mark.parametrize("backend", ["fused", pytest.param("native", marks=native)])


@pytest.fixture(autouse=True)
def _forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_attend, "_PREPARED", {})


@pytest.fixture
def _untyped() -> Iterator[None]:
    """Without the checks of annotations, which users do not have."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


def _inputs(T: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(2, heads, T, 8) for heads in (4, 2, 2))
    return q, k, v


@each_backend
@each_rule
@pytest.mark.parametrize("extras", [(), ("weights", "lse", "entropy")])
@torch.no_grad()
def test_a_call_like_an_earlier_one_is_answered_as_if_it_were_the_first(
    backend: str, how: dict[str, Any], extras: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = _inputs(), _inputs()
    more = {f"need_{name}": True for name in extras} | {"backend": backend}
    for earlier in (*RULES.values(), how):
        attend(*first, **earlier, **more)
    how = how | more
    remembered = attend(*other, **how)
    monkeypatch.setattr(_attend, "_PREPARED", {})
    fresh = attend(*other, **how)
    pairs = zip(remembered, fresh, strict=True) if extras else [(remembered, fresh)]
    for mine, theirs in pairs:
        assert torch.equal(mine, theirs) if isinstance(mine, Tensor) else mine == theirs


@each_backend
def test_what_is_hidden_reaches_nothing_in_a_later_call_either(backend: str) -> None:
    q, k, v = _inputs()
    calm = attend(q, k, v, causal=True, backend=backend)
    k[:, :, -1], v[:, :, -1] = torch.nan, torch.inf
    wild = attend(q, k, v, causal=True, backend=backend)
    assert torch.equal(wild[:, :, :-1], calm[:, :, :-1])
    assert wild[:, :, -1].isnan().all()


@each_backend
def test_gradients_are_those_of_the_call_that_asks_for_them(backend: str) -> None:
    q, k, v = _inputs()
    plain = attend(q, k, v, backend=backend)
    for _ in range(2):
        learned = q.clone().requires_grad_()
        heads = attend(learned, k, v, backend=backend)
        torch.testing.assert_close(heads, plain)
        assert torch.autograd.grad(heads.sum(), learned)[0].any()
    with torch.no_grad():
        assert not attend(learned, k, v, backend=backend).requires_grad


@native
@pytest.mark.usefixtures("_untyped")
def test_a_later_call_is_refused_as_the_first_would_be() -> None:
    q, k, v = _inputs()
    for _ in range(2):
        attend(q, k, v, window=1, backend="native")
        with pytest.raises(ArgumentError, match=r"window: \(1\.0, 1\.0\) is not"):
            attend(q, k, v, window=1.0, backend="native")
    freed = v.clone()
    freed.untyped_storage().resize_(64)
    with pytest.raises(ArgumentError, match=r"v of shape .* is not in memory.* of 64"):
        attend(q, k, freed, window=1, backend="native")
    request, rule = RowRequest(heads=True), make_rule(head_dim=8)
    with pytest.raises(ArgumentError, match=r"v of shape .* is not in memory.* of 64"):
        row_statistics(q, k, freed, rule, request, backend="native")
    with pytest.raises(ArgumentError, match="v of ndarray"):
        attend(q, k, v.numpy(), window=1, backend="native")


@native
def test_a_later_call_may_lie_elsewhere_in_memory() -> None:
    q, k, v = _inputs()
    expected = attend(q, k, v, causal=True, backend="native")
    odd = torch.frombuffer(bytearray(4 * q.numel() + 1), dtype=torch.float32, offset=1)
    askew = odd.view(q.shape).copy_(q)
    assert torch.equal(attend(askew, k, v, causal=True, backend="native"), expected)
    by_token = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(attend(by_token, k, v, causal=True, backend="native"), expected)


@each_backend
def test_autocast_changes_no_call_before_or_after_it(backend: str) -> None:
    q, k, v = _inputs()
    found = []
    for enabled in (False, True, False, True):
        with torch.autocast("cpu", enabled=enabled):
            found.append(attend(q, k, v, backend=backend))
    assert all(x.dtype == torch.float32 and torch.equal(x, found[0]) for x in found)


@pytest.mark.usefixtures("_untyped")
def test_a_learned_scale_is_read_at_every_call() -> None:
    q, k, v = _inputs()
    scale = torch.tensor(0.1)
    before = attend(q, k, v, scale=scale, backend="rows")
    scale.fill_(2.0)
    after = attend(q, k, v, scale=scale, backend="rows")
    torch.testing.assert_close(after, attend(q, k, v, scale=2.0, backend="rows"))
    assert not torch.allclose(before, after)


def test_only_so_many_outlines_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_attend, "MOST_PREPARED", 3)
    for T in range(1, 9):
        attend(*_inputs(T))
        assert 0 < len(_attend._PREPARED) <= 3


def _seen_inside(transform: Callable[[Callable[[Tensor], Tensor]], Any]) -> list[bool]:
    """Whether an outline is remembered: inside of a transform, and after it."""
    seen: list[Tensor] = []
    inside: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.append(x)
        inside.append(eager_outline(x, x, x, library) is not None)
        return x * 1

    transform(look)
    (x,) = seen
    return [*inside, eager_outline(x, x, x, library) is not None]


class _Grads(torch.autograd.Function):
    """Calls a function with its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, look: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.look = look
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.look(grads[0]), None


def _batch_of_gradients(look: Callable[[Tensor], Tensor]) -> None:
    x = torch.ones(1, 1, 2, 2, requires_grad=True)
    torch.autograd.grad(_Grads.apply(x, look), x, torch.ones(3, *x.shape), is_grads_batched=True)


@pytest.mark.parametrize("transform", [
    lambda look: torch.func.vmap(look)(torch.ones(3, 1, 1, 2, 2)),
    lambda look: torch.func.grad(lambda x: look(x).sum())(torch.ones(1, 1, 2, 2)),
    lambda look: torch.func.functionalize(look)(torch.ones(1, 1, 2, 2)),
    _batch_of_gradients,
], ids=["vmap", "grad", "functionalize", "a batch of gradients"])  # fmt: skip
def test_nothing_is_remembered_of_tensors_that_stand_for_others(transform: Any) -> None:
    assert not any(_seen_inside(transform))


@pytest.mark.parametrize(("x", "is_eager"), [
    (torch.ones(1, 1, 2, 2).to_sparse(), False),
    (torch._neg_view(torch.ones(1, 1, 2, 2)), False),
    (torch.ones(1, 1, 2, 2, device="meta"), False),
    (torch.nn.Parameter(torch.ones(1, 1, 2, 2)), True),
    (torch.ones(1, 1, 2, 2).as_subclass(type("Tagged", (Tensor,), {})), False),
], ids=["sparse", "negative", "meta", "parameter", "subclass"])  # fmt: skip
def test_an_outline_is_remembered_of_eager_tensors_alone(x: Tensor, is_eager: bool) -> None:
    assert (eager_outline(x, x, x, library) is not None) == is_eager
    for not_eager in (torch.autograd.forward_ad.dual_level(), FakeTensorMode()):
        with not_eager:
            assert eager_outline(x, x, x, library) is None
