"""The native kernel's gradients equal those of the definition, through heads, lse and entropy."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from describing import RULES, Shape, cast, problem_of, threads
from headwise import masks
from headwise._native_library import library
from headwise.kernels import AttendOutput, attend
from strategies import Problem, problems, seeds
from tiers import diagonal, tiers

pytestmark = pytest.mark.skipif(not library(), reason=f"no native kernel: {library().why}")
OUTPUTS = ("heads", "lse", "entropy")
# How far from the exact ones gradients may be, relative to the largest: half precision rounds what
# came and what it gives, and its heads; pairs of bfloat16 also weights and their gradients.
CLOSE = {torch.float32: 2e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
HALVES = [torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", CLOSE, ids=["f32", "bf16", "f16"])


def _gradients(
    problem: Problem,
    dtype: torch.dtype,
    backend: str,
    through: tuple[str, ...] = OUTPUTS,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Of a random sum over some outputs, and of the rows that have a number there."""
    problem = cast(problem, dtype)
    how = dict(problem.how)
    given_ = zip("qkv", problem.qkv, strict=True)
    learned = {name: x.detach().requires_grad_() for name, x in given_}
    if "sinks" in how:
        learned["sinks"] = how["sinks"] = how["sinks"].clone().requires_grad_()
    q, k, v = (learned[n] for n in "qkv")
    found = attend(q, k, v, **how, need_lse=True, need_entropy=True, backend=backend)
    grads = torch.autograd.grad(
        _sum(found, through, seed), [*learned.values()], materialize_grads=True
    )
    return dict(zip(learned, grads, strict=True))


def _sum(found: AttendOutput, through: tuple[str, ...], seed: int) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    total = found.heads.new_zeros(())
    for name in OUTPUTS:
        rows = getattr(found, name)
        factors = torch.randn(rows.shape, generator=rng).bfloat16().to(rows.dtype)
        if name in through:
            total = total + (factors * rows.where(rows.isfinite(), 0.0)).sum()
    return total


def _assert_close(problem: Problem, dtype: torch.dtype, size: float = 1.0, **how: Any) -> None:
    problem = cast(problem, dtype)
    ours = _gradients(problem, dtype, "native", **how)
    exact = _gradients(problem, torch.float64, "rows", **how)
    for name, grad in ours.items():
        assert grad.dtype == dtype
        most = exact[name].abs().amax().item() if dtype != torch.float32 else 1.0
        close = {"rtol": CLOSE[dtype] * size, "atol": CLOSE[dtype] * size * max(1.0, most)}
        torch.testing.assert_close(grad.double(), exact[name], **close, msg=name)


@dtypes
@pytest.mark.usefixtures("built_for_halves")
@given(
    problem=problems(),
    through=st.sets(st.sampled_from(OUTPUTS), min_size=1).map(lambda names: tuple(sorted(names))),
    seed=seeds,
)
def test_gradients_are_those_of_the_weights(
    dtype: torch.dtype, problem: Problem, through: tuple[str, ...], seed: int
) -> None:
    _assert_close(problem, dtype, size=4.0, through=through, seed=seed)


RULE_NAMES = [name for name in RULES if not name.startswith(("scale", "keys", "blocks", "two"))]


# Of half precision pairs are read where both widths are even, and else none.
PRECISIONS = [
    (torch.float32, (19, 37)),
    (torch.bfloat16, (18, 38)),
    (torch.bfloat16, (20, 37)),
    (torch.float16, (19, 40)),
]
SIZES = [(150, 150), (53, 300), (131, 67), (1, 70)]


@pytest.mark.usefixtures("built_for_halves")
@pytest.mark.parametrize(
    ("rule", "sizes", "precision"),
    tiers(
        [
            *product(RULE_NAMES, SIZES[1:2], PRECISIONS[:2]),
            *diagonal(RULE_NAMES, SIZES, PRECISIONS[:1]),
            *diagonal(RULE_NAMES, SIZES[1:], PRECISIONS),
        ],
        product(RULE_NAMES, SIZES, PRECISIONS),
    ),
    ids=str,
)
def test_every_rule_holds_across_shares_of_keys(
    rule: str, sizes: tuple[int, int], precision: tuple[torch.dtype, tuple[int, int]]
) -> None:
    (T, S), (dtype, (D, Dv)) = sizes, precision
    if rule == "documents" and T > S:
        return
    torch.manual_seed(0)
    _assert_close(problem_of(Shape(2, 4, 2, T, S, D, Dv), rule), dtype, size=2.0)


ERRORS = (False, True), (1.0, 30.0), CLOSE
SHAPES = (1, 64), (7, 5), (129, 64), (509, 61), (700, 128)


@pytest.mark.usefixtures("built_for_halves")
@pytest.mark.parametrize(
    ("causal", "size", "dtype", "shape"),
    tiers(
        [*product(*ERRORS, SHAPES[1:3]), *diagonal(*ERRORS, SHAPES[3:4])], product(*ERRORS, SHAPES)
    ),
)
def test_errors_are_at_most_twice_those_of_torch(
    causal: bool, size: float, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    T, D = shape
    scaled = zip((size, 1, 1, 1), torch.randn(4, 1, 8, T, D), strict=True)
    q, k, v, grad = ((n * x).to(dtype) for n, x in scaled)

    def gradients(dtype: torch.dtype, backend: str) -> list[Tensor]:
        inputs = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        if backend == "torch":
            heads = F.scaled_dot_product_attention(*inputs, is_causal=causal)
        else:
            heads = attend(*inputs, causal=causal, backend=backend)
        return [x.double() for x in torch.autograd.grad(heads, inputs, grad.to(dtype))]

    exact = gradients(torch.float64, "rows")

    def errors(backend: str) -> list[Tensor]:
        pairs = zip(gradients(dtype, backend), exact, strict=True)
        return [(found - known).square().mean().sqrt() for found, known in pairs]

    for name, ours, torchs in zip("qkv", errors("native"), errors("torch"), strict=True):
        assert ours <= 2 * torchs + 1e-7, name


@dtypes
@pytest.mark.usefixtures("built_for_halves")
@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize("n", [2, 3, 8])
def test_threads_do_not_change_a_bit(n: int, kv_heads: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 3, 500, 24), *torch.randn(2, 1, kv_heads, 500, 24)
    problem = Problem(q, k, v, {"causal": True, "sinks": torch.zeros(3)})
    with threads(1):
        alone = _gradients(problem, dtype, "native")
    with threads(n):
        together = [_gradients(problem, dtype, "native") for _ in range(3)]
    for one in together:
        for name, grad in alone.items():
            assert torch.equal(one[name], grad), name


@dtypes
@pytest.mark.usefixtures("built_for_halves")
def test_nothing_comes_back_from_rows_that_see_no_key(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 2, 70, 8) for _ in range(3))
    mask = torch.ones(70, 70, dtype=torch.bool).tril(-1)[None, None] & torch.tensor(
        [True, False]
    ).view(2, 1, 1, 1)
    grads = _gradients(Problem(q, k, v, {"mask": mask}), dtype, "native")
    assert not grads["q"][:, :, 0].any()
    assert not grads["k"][:, :, -1].any()
    for name in "qkv":
        assert grads[name][0].isfinite().all()
        assert grads[name][0].any()
        assert not grads[name][1].any()


@dtypes
@pytest.mark.usefixtures("built_for_halves")
@given(data=st.data())
def test_whatever_is_hidden_reaches_no_gradient(dtype: torch.dtype, data: st.DataObject) -> None:
    problem = cast(data.draw(problems()), dtype)
    S = problem.k.shape[2]
    hidden = torch.tensor(data.draw(st.lists(st.booleans(), min_size=S, max_size=S)))
    mask = masks.as_mask(~hidden[None].expand(problem.q.shape[2], S))
    how = problem.how | {"mask": mask}
    calm_k, calm_v = (x.masked_fill(hidden[:, None], 0.0) for x in (problem.k, problem.v))
    wild_k = problem.k.masked_fill(hidden[:, None], torch.nan)
    wild_v = problem.v.masked_fill(hidden[:, None], torch.inf)
    calm = _gradients(Problem(problem.q, calm_k, calm_v, how), dtype, "native")
    wild = _gradients(Problem(problem.q, wild_k, wild_v, how), dtype, "native")
    for name, grad in calm.items():
        assert torch.equal(wild[name], grad), name


@pytest.mark.usefixtures("built")
def test_strides_of_any_kind_are_read() -> None:
    wide = torch.randn(2, 40, 3, 4, 50)
    strided = [wide[:, :, i].transpose(1, 2)[..., ::2] for i in range(3)]
    how = {"causal": True}
    ours = _gradients(Problem(*strided, how), torch.float32, "native")
    dense = [x.contiguous() for x in strided]
    for name, grad in _gradients(Problem(*dense, how), torch.float32, "native").items():
        assert torch.equal(ours[name], grad)
    learned = [x.requires_grad_() for x in dense]
    summed = {  # what comes back has steps of 0
        name: torch.autograd.grad(attend(*learned, backend=name).sum(), learned)
        for name in ("native", "rows")
    }
    for mine, other in zip(*summed.values(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("built_for_halves")
@pytest.mark.parametrize("half", HALVES, ids=["bf16", "f16"])
@pytest.mark.parametrize("step", [18, 19, 20])  # pairs need a whole number of them in a row
def test_half_precision_comes_back_through_any_strides(half: torch.dtype, step: int) -> None:
    plain = [torch.randn(2, 3, 70, 18).to(half) for _ in range(4)]
    wide = [torch.full((2, 71, 3, step), torch.nan, dtype=half) for _ in plain]
    strided = [x[:, 1:, :, step - 18 :].transpose(1, 2) for x in wide]
    for x, y in zip(strided, plain, strict=True):
        x.copy_(y)

    def gradients(q: Tensor, k: Tensor, v: Tensor, back: Tensor) -> list[Tensor]:
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        heads = attend(*inputs, causal=True, backend="native")
        return [x.float() for x in torch.autograd.grad(heads, inputs, back)]

    for ours, known in zip(gradients(*strided), gradients(*plain), strict=True):
        close = 2 * CLOSE[half]
        torch.testing.assert_close(ours, known, rtol=close, atol=close * known.abs().max().item())


def test_gradients_have_gradients_of_their_own() -> None:
    torch.manual_seed(0)
    given_ = [torch.randn(1, 2, 70, 8) for _ in range(3)] + [torch.randn(2)]

    def penalty(dtype: torch.dtype, backend: str) -> tuple[Tensor, ...]:
        inputs = [x.to(dtype).requires_grad_() for x in given_]
        how = {"causal": True, "sinks": inputs[3], "need_lse": True, "need_entropy": True}
        found = attend(*inputs[:3], **how, backend=backend)
        steps = torch.autograd.grad(_sum(found, OUTPUTS, 0), inputs, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in steps), inputs)

    exact = penalty(torch.float64, "rows")
    for ours, known in zip(penalty(torch.float32, "native"), exact, strict=True):
        torch.testing.assert_close(ours.double(), known, rtol=1e-4, atol=1e-4 * known.abs().max())


@pytest.mark.parametrize("backend", ["native", "fused", "rows"])
@pytest.mark.parametrize("trained", [False, True])
def test_every_backend_tells_the_entropy_of_its_weights(backend: str, trained: bool) -> None:
    q, k, v = (torch.randn(2, 3, 37, 8, requires_grad=trained) for _ in range(3))
    how = {"causal": True, "mask": masks.padding([37, 0]), "backend": backend}
    found = attend(q, k, v, **how, need_weights=True, need_entropy=True)
    entropy = torch.special.entr(found.weights.detach().double()).sum(-1)
    torch.testing.assert_close(found.entropy.double(), entropy, rtol=1e-5, atol=1e-5)
    assert found.entropy.requires_grad == trained
    assert torch.equal(found.heads, attend(q, k, v, **how))


@pytest.mark.full
def test_the_entropy_of_rows_has_first_and_second_derivatives() -> None:
    q, k, v = (torch.randn(1, 2, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def entropy(*inputs: Tensor) -> Tensor:
        how = {"causal": True, "sinks": inputs[3], "softcap": 2.0}
        return attend(*inputs[:3], **how, need_entropy=True, backend="rows").entropy

    assert torch.autograd.gradcheck(entropy, (q, k, v, sinks))
    assert torch.autograd.gradgradcheck(entropy, (q, k, v, sinks))


def test_it_is_chosen_for_training_where_it_can_be() -> None:
    q, k, v = (torch.randn(2, 2, 1024, 16) for _ in range(3))
    learned = v.clone().requires_grad_()
    bias, sinks = torch.zeros(1024, 1024), torch.zeros(2, requires_grad=True)

    def chosen(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> str:
        return attend(q, k, v, need_lse=True, **how).backend

    assert chosen(q, k, learned) == "native"
    assert chosen(q, k, v, sinks=sinks) == "native"
    assert chosen(q, k, learned, bias=bias) == "native"
    assert chosen(q, k, learned, bias=bias.requires_grad_()) == "fused"
    assert chosen(q, k, learned, dropout_p=0.1) == "rows"
    assert chosen(*(x.double() for x in (q, k, learned))) == "fused"


def test_queries_that_are_values_too_and_give_the_keys_are_counted_once() -> None:
    given_ = torch.randn(1, 2, 20, 8)
    grads = torch.randn(3, *given_.shape)

    def found(dtype: torch.dtype, backend: str) -> tuple[Tensor, Tensor]:
        x = given_.to(dtype).requires_grad_()
        heads = attend(x, 2 * x, x, causal=True, backend=backend)
        (first,) = torch.autograd.grad(heads.square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, retain_graph=True)
        (batched,) = torch.autograd.grad(heads, x, grads.to(dtype), is_grads_batched=True)
        return second.double(), batched.double()

    for ours, known in zip(
        found(torch.float32, "native"), found(torch.float64, "rows"), strict=True
    ):
        torch.testing.assert_close(ours, known, rtol=1e-4, atol=1e-4 * known.abs().max())
