"""Laws of positions: rotation keeps norms and encodes distances, as biases do."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headwise.layer import ALiBi, LinearScaling, Llama3Scaling, NTKScaling, RoPE, T5Bias, YaRN
from headwise.layer._biases import PositionedBias
from headwise.masks.tiles import Tile
from oracles_layer import close, position_bias, t5_bucket, turned

SCALINGS = (
    None,
    LinearScaling(3.0),
    NTKScaling(3.0),
    YaRN(3.0, trained_length=64),
    Llama3Scaling(3.0, trained_length=64),
)

ropes = st.builds(
    RoPE,
    width=st.sampled_from([2, 4, 10]),
    base=st.sampled_from([100.0, 10_000.0]),
    pairing=st.sampled_from(["half", "interleaved"]),
    scaling=st.sampled_from(SCALINGS),
)


def _at(*positions: int) -> Tensor:
    return torch.tensor([positions])


@given(rope=ropes)
def test_rotation_is_a_product_of_complex_numbers(rope: RoPE) -> None:
    x = torch.randn(2, 3, 5, 11, dtype=torch.float64)
    close(
        rope.rotate(x, _at(0, 1, 2, 70, -3)), turned(rope, x.numpy(), np.array([0, 1, 2, 70, -3]))
    )


@given(rope=ropes)
def test_each_text_may_have_its_own_positions(rope: RoPE) -> None:
    x = torch.randn(2, 3, 2, 11, dtype=torch.float64)
    output = rope.rotate(x, torch.tensor([[0, 1], [5, 6]]))
    torch.testing.assert_close(output[:1], rope.rotate(x[:1], _at(0, 1)))
    torch.testing.assert_close(output[1:], rope.rotate(x[1:], _at(5, 6)))


@given(rope=ropes, shift=st.integers(-50, 1000))
def test_only_the_distance_matters(rope: RoPE, shift: int) -> None:
    q, k = torch.randn(2, 1, 1, 1, 11, dtype=torch.float64)
    near = (rope.rotate(q, _at(7)) * rope.rotate(k, _at(3))).sum()
    far = (rope.rotate(q, _at(7 + shift)) * rope.rotate(k, _at(3 + shift))).sum()
    torch.testing.assert_close(near, far)


@given(rope=ropes)
def test_rotation_keeps_norms_and_unrotated_features(rope: RoPE) -> None:
    x = torch.randn(1, 1, 4, 11, dtype=torch.float64)
    out = rope.rotate(x, _at(0, 9, 99, 999))
    size = 1.0 if rope.scaling is None else rope.scaling.magnitude
    before, after = (y[..., : rope.width].norm(dim=-1) for y in (x, out))
    torch.testing.assert_close(after, before * size)
    assert torch.equal(out[..., rope.width :], x[..., rope.width :])


@pytest.mark.parametrize("scaling", SCALINGS[1:], ids=lambda s: type(s).__name__)
def test_scaling_lowers_frequencies_by_at_most_its_factor(scaling: LinearScaling) -> None:
    plain = RoPE(64).frequencies(torch.float64)
    slowness = plain / RoPE(64, scaling=scaling).frequencies(torch.float64)
    assert torch.all(slowness.diff() >= -1e-9)
    torch.testing.assert_close(slowness[-1], torch.tensor(3.0, dtype=torch.float64))
    first = 3.0 if isinstance(scaling, LinearScaling) else 1.0
    torch.testing.assert_close(slowness[0], torch.tensor(first, dtype=torch.float64))


def test_scaling_as_the_papers_print_it() -> None:
    width, base, factor = 64, 10_000.0, 3.0
    pair = torch.arange(width // 2, dtype=torch.float64)
    larger = base * factor ** (width / (width - 2))
    ntk = RoPE(width, scaling=NTKScaling(factor)).frequencies(torch.float64)
    torch.testing.assert_close(ntk, larger ** (-2 * pair / width))
    assert YaRN(16.0, trained_length=4096).magnitude == 0.1 * math.log(16.0) + 1


def test_half_precision_rotates_far_positions_precisely() -> None:
    x = torch.randn(1, 1, 1, 64, dtype=torch.float64).bfloat16()
    exact = RoPE(64).rotate(x.double(), _at(30_001))
    error = (RoPE(64).rotate(x, _at(30_001)).double() - exact).abs().max()
    assert error <= (exact.bfloat16().double() - exact).abs().max() + 0.02


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rotates_as_exactly_as_a_plain_implementation(
    dtype: torch.dtype, pairing: str
) -> None:
    rope, positions = RoPE(64, pairing=pairing), torch.arange(500)[None]
    x = torch.randn(1, 2, 500, 64, dtype=torch.float64).to(dtype)
    exact = rope.rotate(x.double(), positions)
    angles = torch.arange(500)[:, None] * rope.frequencies()
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    if pairing == "half":
        first, second = x.chunk(2, -1)
        plain = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    else:
        first, second = x[..., 0::2], x[..., 1::2]
        plain = torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(
            -2
        )
    error = (rope.rotate(x, positions).double() - exact).abs()
    worst = (plain.double() - exact).abs()
    assert error.max() <= 2 * worst.max()
    assert error.mean() <= worst.mean()


@pytest.mark.parametrize("part", [ALiBi(3), T5Bias(3, 8, 16)], ids=["alibi", "t5"])
@pytest.mark.parametrize(("T", "S"), [(5, 5), (5, 11), (11, 5), (1, 7), (0, 5), (5, 0)])
def test_a_bias_along_diagonals_is_the_bias_of_every_pair(
    part: ALiBi | T5Bias, T: int, S: int
) -> None:
    positions = torch.arange(S - T, S)[None], torch.arange(S)[None]
    quick, plain = (
        PositionedBias(part, *positions, torch.float64, steps) for steps in (True, False)
    )
    tiles = [Tile.whole(T, S)]
    if T > 2 and S > 3:
        tiles.append(Tile(T, S, range(1, T - 1), range(2, S), tiles[0].device))
    for tile in tiles:
        assert torch.equal(quick.tile(tile), plain.tile(tile))


@pytest.mark.parametrize("n_heads", [1, 2, 3, 8, 12])
def test_alibi_is_a_slope_times_the_distance(n_heads: int) -> None:
    part = ALiBi(n_heads)
    close(
        part(torch.arange(2, 7)[None], torch.arange(7)[None], torch.float64),
        position_bias(part, 5, 7),
    )


def test_alibi_slopes_equal_those_of_the_paper() -> None:
    assert ALiBi(8).slopes() == tuple(2.0**-n for n in range(1, 9))
    assert ALiBi(12).slopes()[8:] == tuple(2.0**-n for n in (0.5, 1.5, 2.5, 3.5))


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_buckets_equal_those_of_the_paper(bidirectional: bool) -> None:
    part = T5Bias(2, bidirectional=bidirectional)
    ahead = torch.arange(-200, 201)
    assert part.bucket(ahead).tolist() == [t5_bucket(part, n) for n in ahead.tolist()]
    assert part.bucket(ahead).unique().numel() == (32 - 1 if bidirectional else 32)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_bias_is_looked_up_by_bucket(bidirectional: bool) -> None:
    part = T5Bias(3, 8, 16, bidirectional=bidirectional).double()
    bias = part(torch.arange(2, 7)[None], torch.arange(7)[None], torch.float64)
    close(bias, position_bias(part, 5, 7))
