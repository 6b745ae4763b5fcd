"""The native kernel as a torch operator: tracing, vmap, gradients and equality."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from headwise import _native_library
from headwise._native_library import library
from headwise.kernels import attend
from headwise.kernels._rule import Lowered, rule_from_lowered
from headwise.kernels.native._autograd import attention, attention_backward
from headwise.kernels.rows import attend_rows
from tiers import tiers

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


def _learned(words: Lowered) -> tuple[list[Tensor], Lowered]:
    """Queries, keys, values and sinks that require gradients, and their lowered arguments."""
    if words.sinks is not None:
        words = words._replace(sinks=words.sinks.clone().requires_grad_())
    inputs = [x.requires_grad_() for x in _inputs()]
    return inputs, words


@pytest.mark.parametrize("name", tiers(["added"], WORDS))
def test_the_operator_can_be_traced_in_training(name: str) -> None:
    inputs, words = _learned(WORDS[name])
    torch.library.opcheck(attention, (*inputs, True, *words))


@each
@pytest.mark.parametrize("back", [(0,), (1,), (0, 1, 2)], ids=str)
def test_gradients_equal_those_of_pytorch(words: Lowered, back: tuple[int, ...]) -> None:
    inputs, words = _learned(words)
    leaves = inputs + ([] if words.sinks is None else [words.sinks])
    rows = attend_rows(*inputs, rule_from_lowered(words, T, S), entropy=True)
    rows["lse"] = rows["lse"].masked_fill(rows["lse"] == -torch.inf, 0.0)
    output = attention(*inputs, True, *words)
    ours = [output[0], output[1].masked_fill(output[1] == -torch.inf, 0.0), output[2]]
    expected = [rows[name] for name in ("heads", "lse", "entropy")]
    weights = [torch.randn_like(x) for x in expected]
    grads = [
        torch.autograd.grad([outputs[i] for i in back], leaves, [weights[i] for i in back],
                            materialize_grads=True)
        for outputs in (ours, expected)
    ]  # fmt: skip
    for actual, known in zip(*grads, strict=True):
        torch.testing.assert_close(actual, known, rtol=1e-4, atol=1e-5)


def test_gradients_flow_through_vmap() -> None:
    leaves = [x.requires_grad_() for x in _inputs()]
    stacked = [torch.stack([x, 2 * x]) for x in leaves]
    words = WORDS["window"]
    mapped = torch.func.vmap(attention, in_dims=(0, 0, None, *[None] * 11))
    output = mapped(stacked[0], stacked[1], leaves[2], True, *words)[0]
    each = [attention(stacked[0][n], stacked[1][n], leaves[2], True, *words)[0] for n in (0, 1)]
    ours, theirs = (
        torch.autograd.grad(x.square().sum(), leaves, retain_graph=True)
        for x in (output, torch.stack(each))
    )
    torch.testing.assert_close(ours, theirs)


@each
@pytest.mark.parametrize("mapped", ["gradients", "all"])
def test_vmap_works_over_the_backward_operator(words: Lowered, mapped: str) -> None:
    inputs = _inputs()
    output = attention(*inputs, True, *words)
    arguments = [*inputs, *output, *(torch.randn_like(x) for x in output), *words]
    chosen = range(6, 9) if mapped == "gradients" else range(len(arguments))
    axes = {
        i: i % 2 for i in chosen if isinstance(arguments[i], Tensor)
    }  # the axis that vmap maps over
    stacked = [
        torch.stack([x, x], dim=axes[i]) if i in axes else x for i, x in enumerate(arguments)
    ]
    for i in range(6, 9):
        stacked[i].select(axes[i], 1).neg_()
    dims = tuple(axes.get(i) for i in range(len(arguments)))
    gradients = torch.func.vmap(attention_backward, in_dims=dims)(*stacked)
    for gradient, stacked_pair in zip(attention_backward(*arguments), gradients, strict=True):
        torch.testing.assert_close(stacked_pair, torch.stack([gradient, -gradient]))


@each
def test_the_operator_works_without_the_native_kernel(
    words: Lowered, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = (*_inputs(), True, *words)
    with monkeypatch.context() as patch:
        patch.setenv(_native_library.SWITCH, "0")
        library.cache_clear()
        output = attention(*inputs)
    library.cache_clear()
    for actual, expected in zip(output, attention(*inputs), strict=True):
        torch.testing.assert_close(actual, expected)
        assert actual.stride() == expected.stride()


@each
@pytest.mark.parametrize("mapped", ["all", "queries", "keys and values", "rule"])
def test_vmap_works_over_any_input(words: Lowered, mapped: str) -> None:
    inputs = [*_inputs(), True, *words]
    chosen = {
        "all": range(len(inputs)),
        "queries": [0],
        "keys and values": [1, 2],
        "rule": range(4, len(inputs)),
    }[mapped]
    axes = {
        i: i % 2 for i in chosen if isinstance(inputs[i], Tensor)
    }  # the axis that vmap maps over
    if not axes:
        return
    stacked = [
        torch.stack([x, x.flip(0), x], dim=axes[i]) if i in axes else x
        for i, x in enumerate(inputs)
    ]
    dims = tuple(axes.get(i) for i in range(len(inputs)))
    output = torch.func.vmap(attention, in_dims=dims)(*stacked)
    for n in range(3):
        single = [x.select(axes[i], n) if i in axes else x for i, x in enumerate(stacked)]
        for actual, expected in zip(output, attention(*single), strict=True):
            torch.testing.assert_close(actual[n], expected)


def test_fake_tensors_give_the_output_shapes() -> None:
    with FakeTensorMode():
        q = torch.randn(2, 4, 300, 32)
        output = attend(q, q, q, need_lse=True)
    assert (output.heads.shape, output.lse.shape) == ((2, 4, 300, 32), (2, 4, 300))
    assert output.backend == "native"
    assert output.heads.stride() == (300 * 128, 32, 128, 1)


def test_a_value_tracer_records_the_operator() -> None:
    def heads(q: Tensor) -> Tensor:
        return attend(q, q, q, backend="native")

    q = torch.randn(1, 2, 9, 4)
    torch.testing.assert_close(make_fx(heads)(q)(-q), heads(-q))


def test_tables_of_distances_equal_their_bias() -> None:
    words = Lowered(by_distance=torch.arange(T + S - 1.0)[None, None])
    bias = rule_from_lowered(words, T, S).bias.values
    assert bias.shape == (1, 1, T, S)
    assert bias[0, 0, 0, S - 1] == 0
    assert bias[0, 0, T - 1, 0] == T + S - 2
    q, k, v = _inputs()
    plain = attend(q, k, v, bias=bias, scale=1.0, backend="rows")
    torch.testing.assert_close(attention(q, k, v, False, *words)[0], plain)
