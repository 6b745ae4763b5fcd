"""The chart of curves: well-formed, complete, and safe whatever the names."""

from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.tables import Curves, draw_curves

SVG = "{http://www.w3.org/2000/svg}"


def _curves(names: dict[str, int], scale: float = 1.0) -> Curves:
    rng = np.random.default_rng(0)
    return Curves(
        np.array([0, 8, 16, 40]),
        72,
        {name: scale * rng.random((orders, 4, 3)).cumsum(1) for name, orders in names.items()},
        "embedding",
    )


@given(scale=st.floats(1e-6, 1e6), orders=st.integers(1, 3))
def test_every_point_lies_within_the_picture(scale: float, orders: int) -> None:
    root = ElementTree.fromstring(draw_curves(_curves({"one": 1, "random": orders}, scale)))
    drawn = [path for path in root.iter(f"{SVG}path") if " L" in path.attrib["d"]]
    assert len(drawn) == 2 + (orders > 1)
    for path in drawn:
        pairs = path.attrib["d"].removeprefix("M").removesuffix(" Z").split(" L")
        assert len(pairs) in (4, 8)
        for pair in pairs:
            x, y = map(float, pair.split())
            assert 64 <= x <= 520
            assert 23.9 <= y <= 372.1


def test_higher_is_worse_and_further_right_is_fewer_heads() -> None:
    values = np.array([[[0.0], [0.5], [1.0]]])
    picture = draw_curves(Curves(np.array([0, 1, 2]), 4, {"one": values}, "lm"))
    assert '<path d="M64.0 372.0 L292.0 198.0 L520.0 24.0"' in picture
    assert ">mean loss: lm, nats per token</text>" in picture
    assert ">heads removed, of 4</text>" in picture


def test_names_are_escaped() -> None:
    hostile = "<script>alert('1')</script> & so on"
    picture = draw_curves(_curves({hostile: 1, "random": 5}), title="</title><script>")
    root = ElementTree.fromstring(picture)
    assert not list(root.iter(f"{SVG}script"))
    assert hostile in [text.text for text in root.iter(f"{SVG}text")]


@pytest.mark.parametrize("several", [2, 7])
def test_labels_do_not_cover_each_other(several: int) -> None:
    same = np.ones((1, 2, 3))
    curves = Curves(np.array([0, 4]), 8, {f"order {n}": same for n in range(several)})
    root = ElementTree.fromstring(draw_curves(curves))
    labels = [text for text in root.iter(f"{SVG}text") if (text.text or "").startswith("order")]
    places = sorted(float(label.attrib["y"]) for label in labels)
    assert len(places) == several
    assert (np.diff(places) >= 14.9).all()


def test_no_loss_is_a_flat_line() -> None:
    zeros = Curves(np.array([0, 4]), 8, {"one": np.zeros((1, 2, 3))})
    assert "M64.0 372.0 L520.0 372.0" in draw_curves(zeros)


def test_the_elbow_is_a_dot_on_its_curve_and_has_a_row_with_its_interval() -> None:
    # Two texts, so the draws are: one, the other, both. At 2 of 4 heads one alone has lost 0.6.
    values = np.array([[[0.0, 0.0], [0.1, 0.6], [1.0, 1.0]]])
    curves = Curves(np.array([0, 2, 4]), 8, {"one": values, "random": values.repeat(3, 0)}, "lm")
    root = ElementTree.fromstring(draw_curves(curves, allowed=0.5))
    dots = [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in root.iter(f"{SVG}circle")]
    # x from 64 at no head to 520 at 4; y from 372 at no loss to 24 at 1. None on the band.
    assert dots == [(292.0, 250.2), (292.0, 464.0), (292.0, 482.0)]
    rows = [path for path in root.iter(f"{SVG}path") if "m0 -4" in path.attrib["d"]]
    assert [row.attrib["d"] for row in rows] == [
        f"M64.0 {y} v8 m0 -4 H292.0 m0 -4 v8" for y in (460.0, 478.0)
    ]
    labels = [text.text for text in root.iter(f"{SVG}text")]
    assert labels[-2:] == ["one: 2 (0 to 2)", "random, 3 orders: 2 (0 to 2)"]
    assert "0.5 more" in labels
    [bar] = [path for path in root.iter(f"{SVG}path") if "stroke-dasharray" in path.attrib]
    assert bar.attrib["d"] == "M64 198.0 H520"
    assert float(root.attrib["viewBox"].split()[3]) > 482


def test_curves_that_continue_others_are_dashed_in_their_color() -> None:
    first = Curves(np.array([0, 2]), 8, {name: np.ones((1, 2, 2)) for name in ("a", "a, b", "z")})
    second = Curves(
        np.array([0, 2]), 8, {f"{name}, later": np.ones((1, 2, 2)) for name in ("a, b", "y")}
    )
    root = ElementTree.fromstring(draw_curves(first, second))
    looks = {
        text.text: (path.attrib["stroke"], "stroke-dasharray" in path.attrib)
        for path, text in zip(
            [path for path in root.iter(f"{SVG}path") if path.attrib["d"].endswith("h20")],
            [text for text in root.iter(f"{SVG}text") if "fill" in text.attrib],
            strict=True,
        )
    }
    assert [dashed for _, dashed in looks.values()] == [False, False, False, True, True]
    colors = {name: color for name, (color, _) in looks.items()}
    assert colors["a, b, later"] == colors["a, b"]
    assert len(set(colors.values())) == 4


@given(low=st.floats(0, 1e3), span=st.floats(1e-6, 1e6))
def test_ticks_are_a_few_round_numbers_around_the_data(low: float, span: float) -> None:
    losses = np.array([[[low], [low + span]]])
    root = ElementTree.fromstring(draw_curves(Curves(np.array([0, 4]), 8, {"one": losses})))
    beside = [text for text in root.iter(f"{SVG}text") if text.attrib.get("text-anchor") == "end"]
    assert 2 <= len(beside) <= 8
    # Whole heads only, each with its share of all heads.
    below = [
        text.text or "" for text in root.iter(f"{SVG}text") if "middle" in text.attrib.values()
    ]
    assert below[::2] == ["0", "1", "2", "3", "4", "heads removed, of 8"]
    assert below[1::2] == ["0 %", "12 %", "25 %", "38 %", "50 %"]


def test_an_elbow_of_one_text_has_no_interval() -> None:
    curves = Curves(np.array([0, 4]), 8, {"one": np.zeros((1, 2, 1))})
    picture = draw_curves(curves, allowed=0.1)
    assert "<circle" in picture
    assert "m0 -4" not in picture


def test_a_loss_that_rounds_to_below_zero_starts_at_zero() -> None:
    curves = Curves(np.array([0, 4]), 8, {"one": np.array([[[-1e-7], [0.4]]])})
    root = ElementTree.fromstring(draw_curves(curves))
    beside = [text.text for text in root.iter(f"{SVG}text") if "end" in text.attrib.values()]
    assert beside == ["0", "0.1", "0.2", "0.3", "0.4"]


def test_the_allowance_lies_within_the_picture() -> None:
    curves = Curves(np.array([0, 4]), 8, {"one": np.full((1, 2, 2), 0.5)})
    root = ElementTree.fromstring(draw_curves(curves, allowed=7.3))
    [bar] = [path for path in root.iter(f"{SVG}path") if "stroke-dasharray" in path.attrib]
    assert 24 <= float(bar.attrib["d"].split()[1]) <= 372


def test_curves_with_different_points_share_a_chart() -> None:
    first = Curves(np.array([0, 2, 8]), 8, {"one": np.ones((1, 3, 2))})
    second = Curves(np.array([0, 4]), 8, {"two": np.ones((1, 2, 2))})
    root = ElementTree.fromstring(draw_curves(first, second))
    ends = [
        path.attrib["d"].split()[-2] for path in root.iter(f"{SVG}path") if " L" in path.attrib["d"]
    ]
    assert ends == ["L520.0", "L292.0"]
