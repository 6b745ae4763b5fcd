"""The native kernel as an operator: what may be asked of any operator, and what it equals."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from headwise import _library
from headwise._library import library
from headwise.kernels import attend
from headwise.kernels.native._operators import attention, attention_backward
from headwise.kernels.rows import attend_rows
from headwise.kernels.spec._lowered import Lowered, lower, rule_from_lowered

pytestmark = pytest.mark.skipif(not library(), reason=f"no native kernel: {library().why}")

B, H, Hkv, T, S, D, Dv = 2, 6, 3, 7, 11, 5, 13
WORDS = {
    "nothing": Lowered(scale=0.4),
    "window": Lowered(left=3, right=0, softcap=2.0),
    "lengths": Lowered(key_range=torch.tensor([[0, 9], [2, 2]])),
    "documents": Lowered(documents=torch.arange(S)[None] // 4),
    "mask": Lowered(mask=torch.rand(1, 1, T, S) < 0.7),
    "added": Lowered(
        bias=torch.randn(B, 1, T, S), by_distance=torch.randn(1, H, T + S - 1), sinks=torch.zeros(H)
    ),
}
each = pytest.mark.parametrize("words", WORDS.values(), ids=list(WORDS))


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, H, T, D), torch.randn(B, Hkv, S, D), torch.randn(B, Hkv, S, Dv)


@each
def test_it_is_an_operator_that_pytorch_can_trace(words: Lowered) -> None:
    torch.library.opcheck(attention, (*_inputs(), True, *words))


def _learned(words: Lowered) -> tuple[list[Tensor], Lowered]:
    """Queries, keys, values and sinks that gradients are asked of, and the words with them."""
    if words.sinks is not None:
        words = words._replace(sinks=words.sinks.clone().requires_grad_())
    inputs = [x.requires_grad_() for x in _inputs()]
    return inputs, words


@each
def test_it_is_one_in_training_too(words: Lowered) -> None:
    inputs, words = _learned(words)
    torch.library.opcheck(attention, (*inputs, True, *words))


@each
@pytest.mark.parametrize("back", [(0,), (1,), (0, 1, 2)], ids=str)
def test_gradients_are_those_of_pytorch(words: Lowered, back: tuple[int, ...]) -> None:
    inputs, words = _learned(words)
    leaves = inputs + ([] if words.sinks is None else [words.sinks])
    rows = attend_rows(*inputs, rule_from_lowered(words, T, S), entropy=True)
    rows["lse"] = rows["lse"].masked_fill(rows["lse"] == -torch.inf, 0.0)
    found = attention(*inputs, True, *words)
    ours = [found[0], found[1].masked_fill(found[1] == -torch.inf, 0.0), found[2]]
    theirs = [rows[name] for name in ("heads", "lse", "entropy")]
    weights = [torch.randn_like(x) for x in theirs]
    grads = [
        torch.autograd.grad([some[i] for i in back], leaves, [weights[i] for i in back],
                            materialize_grads=True)
        for some in (ours, theirs)
    ]  # fmt: skip
    for mine, other in zip(*grads, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_gradients_come_back_through_vmap() -> None:
    leaves = [x.requires_grad_() for x in _inputs()]
    stacked = [torch.stack([x, 2 * x]) for x in leaves]
    words = WORDS["window"]
    mapped = torch.func.vmap(attention, in_dims=(0, 0, None, *[None] * 11))
    found = mapped(stacked[0], stacked[1], leaves[2], True, *words)[0]
    each = [attention(stacked[0][n], stacked[1][n], leaves[2], True, *words)[0] for n in (0, 1)]
    ours, theirs = (
        torch.autograd.grad(x.square().sum(), leaves, retain_graph=True)
        for x in (found, torch.stack(each))
    )
    torch.testing.assert_close(ours, theirs)


@each
@pytest.mark.parametrize("mapped", ["gradients", "all"])
def test_the_way_back_maps_too(words: Lowered, mapped: str) -> None:
    inputs = _inputs()
    found = attention(*inputs, True, *words)
    given = [*inputs, *found, *(torch.randn_like(x) for x in found), *words]
    chosen = range(6, 9) if mapped == "gradients" else range(len(given))
    at = {i: i % 2 for i in chosen if isinstance(given[i], Tensor)}  # which axis is mapped over
    stacked = [torch.stack([x, x], dim=at[i]) if i in at else x for i, x in enumerate(given)]
    for i in range(6, 9):
        stacked[i].select(at[i], 1).neg_()
    dims = tuple(at.get(i) for i in range(len(given)))
    gradients = torch.func.vmap(attention_backward, in_dims=dims)(*stacked)
    for one, both in zip(attention_backward(*given), gradients, strict=True):
        torch.testing.assert_close(both, torch.stack([one, -one]))


def test_half_precision_comes_back_as_by_attend() -> None:
    inputs = [x.bfloat16().requires_grad_() for x in _inputs()]
    sinks = torch.randn(H, dtype=torch.bfloat16, requires_grad=True)
    found = attention(*inputs, True, *Lowered(scale=0.3, sinks=sinks))
    known = attend(
        *inputs, scale=0.3, sinks=sinks, need_lse=True, need_entropy=True, backend="native"
    )
    theirs = (known.heads, known.lse, known.entropy)
    weights = [torch.randn_like(x) for x in found]
    for ours, other in zip(
        torch.autograd.grad(found, [*inputs, sinks], weights),
        torch.autograd.grad(theirs, [*inputs, sinks], weights),
        strict=True,
    ):
        assert ours.dtype == torch.bfloat16
        assert torch.equal(ours, other)


def test_torch_func_differentiates_what_pytorch_computes() -> None:
    def loss(q: Tensor) -> Tensor:
        found = attend(q, q, q, need_lse=True)
        assert found.backend == "fused"
        return found.heads.square().sum()

    q = torch.randn(1, 4, 300, 32)  # long enough for the native kernel
    found = torch.func.grad(loss)(q)
    q.requires_grad_()
    (known,) = torch.autograd.grad(attend(q, q, q).square().sum(), q)
    torch.testing.assert_close(found, known, rtol=1e-4, atol=1e-4)


@each
def test_words_and_rules_say_the_same(words: Lowered) -> None:
    q, k, v = _inputs()
    rule = rule_from_lowered(words, T, S)
    again = lower(rule, T, S)
    for found, expected in zip(
        attention(q, k, v, False, *again), attention(q, k, v, False, *words), strict=True
    ):
        torch.testing.assert_close(found, expected)


@each
def test_without_the_kernel_it_still_computes(
    words: Lowered, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = (*_inputs(), True, *words)
    with monkeypatch.context() as patch:
        patch.setenv(_library.SWITCH, "0")
        library.cache_clear()
        found = attention(*inputs)
    library.cache_clear()
    for mine, theirs in zip(found, attention(*inputs), strict=True):
        torch.testing.assert_close(mine, theirs)
        assert mine.stride() == theirs.stride()


@each
@pytest.mark.parametrize("mapped", ["all", "queries", "keys and values", "rule"])
def test_it_maps_over_any_of_its_inputs(words: Lowered, mapped: str) -> None:
    inputs = [*_inputs(), True, *words]
    chosen = {
        "all": range(len(inputs)),
        "queries": [0],
        "keys and values": [1, 2],
        "rule": range(4, len(inputs)),
    }[mapped]
    at = {i: i % 2 for i in chosen if isinstance(inputs[i], Tensor)}  # which axis is mapped over
    if not at:
        return
    stacked = [
        torch.stack([x, x.flip(0), x], dim=at[i]) if i in at else x for i, x in enumerate(inputs)
    ]
    dims = tuple(at.get(i) for i in range(len(inputs)))
    found = torch.func.vmap(attention, in_dims=dims)(*stacked)
    for n in range(3):
        one = [x.select(at[i], n) if i in at else x for i, x in enumerate(stacked)]
        for mine, theirs in zip(found, attention(*one), strict=True):
            torch.testing.assert_close(mine[n], theirs)


@pytest.mark.parametrize("batches", [(0, 0, 0), (0, None, None), (None, 1, 1)])
def test_attend_maps_over_a_batch_by_the_operator(batches: tuple[int | None, ...]) -> None:
    def one(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        found = attend(*inputs, causal=True, need_lse=True)
        assert found.backend == "native"
        return found.heads, found.lse

    q, k, v = (torch.randn(2, 4, 300, 32) for _ in range(3))
    stacked = [
        x if at is None else torch.stack([x, -x], dim=at)
        for x, at in zip((q, k, v), batches, strict=True)
    ]
    found = torch.func.vmap(one, in_dims=batches)(*stacked)
    for n, sign in enumerate((1, -1)):
        signs = (1 if at is None else sign for at in batches)
        expected = one(*(x * s for x, s in zip((q, k, v), signs, strict=True)))
        torch.testing.assert_close((found[0][n], found[1][n]), expected)


def test_a_shape_alone_is_enough() -> None:
    with FakeTensorMode():
        q = torch.randn(2, 4, 300, 32)
        found = attend(q, q, q, need_lse=True)
    assert (found.heads.shape, found.lse.shape) == ((2, 4, 300, 32), (2, 4, 300))
    assert found.backend == "native"
    assert found.heads.stride() == (300 * 128, 32, 128, 1)


def test_a_tracer_that_sees_numbers_writes_the_kernel_down() -> None:
    def heads(q: Tensor) -> Tensor:
        return attend(q, q, q, backend="native")

    q = torch.randn(1, 2, 9, 4)
    torch.testing.assert_close(make_fx(heads)(q)(-q), heads(-q))


def test_tables_of_distances_are_the_bias_that_they_stand_for() -> None:
    words = Lowered(by_distance=torch.arange(T + S - 1.0)[None, None])
    bias = rule_from_lowered(words, T, S).bias.values
    assert bias.shape == (1, 1, T, S)
    assert bias[0, 0, 0, S - 1] == 0
    assert bias[0, 0, T - 1, 0] == T + S - 2
    q, k, v = _inputs()
    plain = attend(q, k, v, bias=bias, scale=1.0, backend="rows")
    torch.testing.assert_close(attention(q, k, v, False, *words)[0], plain)
