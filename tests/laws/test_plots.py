"""Figures: what is drawn is what the results hold, and whatever the names, it can be drawn."""

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib.pyplot as plt
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from matplotlib.image import AxesImage

import headwise as hw
from headwise import report
from headwise.errors import ArgumentError, MissingPackageError, OutputError
from headwise.layer import MultiHeadAttention
from headwise.tables import Curves, Head, HeadTable, Scores, Totals, save_figure

HOSTILE = "<script>alert('1')</script> $x_1 & \x1b[31m"
HEADS = tuple(Head("", layer, head) for layer in range(3) for head in range(5))


@pytest.fixture(autouse=True)
def _closed() -> Any:
    yield
    plt.close("all")


def _scores(values: np.ndarray, heads: tuple[Head, ...] = HEADS) -> Scores:
    return Scores(heads, np.arange(len(heads)), values, method="half-gate", loss="lm")


def _table(mean: np.ndarray) -> HeadTable:
    ones = np.ones((1, len(mean)))
    totals = Totals.of_texts(mean[None], ones, mean)
    return HeadTable(HEADS, np.arange(len(mean)), {"entropy": totals, HOSTILE: totals})


def _image(ax: Any) -> AxesImage:
    [image] = ax.get_images()
    return image


def test_a_map_shows_each_head_at_its_layer_and_number() -> None:
    mean = np.arange(15.0)
    ax = _table(mean).plot("entropy")
    assert _image(ax).get_array().tolist() == mean.reshape(3, 5).tolist()
    assert ax.figure.axes[1].get_ylabel() == "entropy (nats)"
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("head", "layer")


@pytest.mark.parametrize(("layers", "per_layer"), [(2, 5), (6, 12), (30, 9), (48, 4), (80, 64)])
def test_a_map_of_many_layers_is_no_strip(layers: int, per_layer: int) -> None:
    heads = tuple(Head("", layer, head) for layer in range(layers) for head in range(per_layer))
    width, height = _scores(np.ones((1, len(heads))), heads).plot().figure.get_size_inches()
    assert height <= 4 / 3 * width


def test_heads_that_a_layer_does_not_have_are_gaps_and_stacks_are_named() -> None:
    heads = (Head("encoder", 0, 0), Head("encoder", 0, 2), Head("decoder", 0, 1))
    ax = _scores(np.array([[1.0, 2.0, 3.0]]), heads).plot()
    drawn = _image(ax).get_array()
    assert drawn.mask.tolist() == [[False, True, False], [True, False, True]]
    assert [text.get_text() for text in ax.get_yticklabels()] == ["encoder 0", "decoder 0"]


def test_a_statistic_that_does_not_apply_is_a_cross_and_infinity_too() -> None:
    values = np.arange(15.0)
    values[[3, 7]] = np.nan, np.inf
    ax = _table(values).plot("entropy")
    crosses = [(int(x), int(y)) for line in ax.lines for x, y in zip(*line.get_data(), strict=True)]
    assert crosses == [(3, 0), (2, 1)]
    assert _image(ax).get_clim() == (0.0, 14.0)
    nothing = _table(np.full(15, np.nan)).plot("entropy")
    assert len(nothing.lines) == 15


def test_more_is_darker_in_figures_as_on_pages_in_print() -> None:
    ax = _table(np.arange(15.0)).plot("entropy")
    colors = _image(ax).cmap(np.linspace(0, 1, 17))
    assert (np.diff(colors[:, :3] @ [0.2126, 0.7152, 0.0722]) < 0).all()
    style = (Path(report.__file__).parent / "page" / "style" / "base.css").read_text("utf-8")
    named = [re.search(f"--{name}: (#\\w+)", style)[1] for name in ("low", "mid", "high")]
    assert [to_hex(color) for color in colors[::8]] == named


def test_values_of_both_signs_diverge_from_zero() -> None:
    ax = _scores(np.linspace(-1, 3, 15)[None]).plot()
    assert _image(ax).get_clim() == (-3.0, 3.0)


def test_a_ranking_goes_from_the_least_important_head_up_with_intervals() -> None:
    scores = _scores(np.random.default_rng(0).random((7, 15)))
    ax = scores.plot(kind="ranking")
    [points] = [line for line in ax.lines if line.get_marker() == "o"]
    assert points.get_ydata().tolist() == sorted(scores.importance)
    assert [x.get_text() for x in ax.get_xticklabels()] == [str(head) for head in scores.order()]
    ends = np.array([path.vertices[:, 1] for path in ax.collections[0].get_paths()])
    rows = [scores.row(head) for head in scores.order()]
    assert ends == pytest.approx(np.stack(scores.interval(), 1)[rows])


def test_a_plan_has_holes_where_heads_go() -> None:
    plan = hw.plan(_scores(np.arange(15.0)[None]), remove=0.2)
    ax = plan.plot()
    kept, removed = ax.lines
    assert set(zip(*removed.get_data(), strict=True)) == {
        (head.head, head.layer) for head in plan.removed
    }
    assert len(kept.get_xdata()) == 12
    assert ax.get_title() == "3 of 15 heads removed"


def test_a_plan_for_a_cache_tells_the_heads_that_keep_all_tokens() -> None:
    plan = hw.CachePlan.of({0: [1], 2: [0]}, n_layers=3, n_kv_heads=2, sinks=4, window=64)
    ax = plan.plot()
    letters = {tuple(map(int, text.get_position())): text.get_text() for text in ax.texts}
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert legend == ["A  4 first, 64 latest tokens, 4", "B  all tokens, 2"]
    assert {place for place, letter in letters.items() if letter == "B"} == {(1, 0), (0, 2)}


def test_axes_that_are_given_are_drawn_on_and_returned() -> None:
    figure, ax = plt.subplots()
    assert _scores(np.ones((1, 15))).plot(ax=ax) is ax
    assert plt.get_fignums() == [figure.number]


def test_weights_are_drawn_as_the_watch_has_them() -> None:
    import torch

    layer = MultiHeadAttention(8, 2)
    with hw.observe(layer, hw.Request(maps=True)) as watch:
        layer(torch.randn(3, 5, 8), causal=True)
    ax = watch.plot("L0.H1", text=2)
    assert _image(ax).get_array().tolist() == watch.weights("L0.H1")[2].tolist()
    assert ax.get_xticks().tolist() == ax.get_yticks().tolist() == [0, 1, 2, 3, 4]
    words = ["a$b", "it", "was", "so", "tired"]
    named = watch.plot("L0.H1", tokens=words)
    for axis in (named.xaxis, named.yaxis):
        assert [label.get_text() for label in axis.get_ticklabels()] == words
    with pytest.raises(ArgumentError, match="text=3"):
        watch.plot("L0.H1", text=3)
    with pytest.raises(ArgumentError, match="4 tokens for 5 keys"):
        watch.plot("L0.H1", tokens=words[:4])


def _curves(names: dict[str, int], scale: float = 1.0) -> Curves:
    rng = np.random.default_rng(0)
    return Curves(
        np.array([0, 8, 16, 40]),
        72,
        {name: scale * rng.random((orders, 4, 3)).cumsum(1) for name, orders in names.items()},
        "embedding",
    )


@given(scale=st.floats(1e-6, 1e6), orders=st.integers(1, 3))
def test_each_order_is_a_line_of_its_means(scale: float, orders: int) -> None:
    curves = _curves({"one": 1, "random": orders}, scale)
    ax = curves.plot()
    assert len(ax.lines) == 2
    for line, name in zip(ax.lines, curves.per_text, strict=True):
        assert line.get_xdata().tolist() == [0, 8, 16, 40]
        assert line.get_ydata() == pytest.approx(curves.mean(name).mean(0))
    assert len(ax.collections) == (orders > 1)  # the band
    assert ax.get_ylabel() == "mean loss: embedding, 1 − cosine"
    plt.close(ax.figure)


def test_the_elbow_is_a_dot_on_its_curve_with_its_interval() -> None:
    # Two texts, so the draws are: one, the other, both. At 2 of 4 heads one alone has lost 0.6.
    values = np.array([[[0.0, 0.0], [0.1, 0.6], [1.0, 1.0]]])
    curves = Curves(np.array([0, 2, 4]), 8, {"one": values, "random": values.repeat(3, 0)}, "lm")
    ax = curves.plot(allowed=0.5)
    [dot] = [line for line in ax.lines if line.get_marker() == "o"]
    assert (dot.get_xdata().item(), dot.get_ydata().item()) == (2, pytest.approx(0.35))
    [interval] = [line for line in ax.lines if line.get_marker() == "|"]
    assert interval.get_xdata().tolist() == [0, 2]
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["one: 2 (0 to 2)", "random, 3 orders: 2 (0 to 2)", "0.5 more"]


def test_an_elbow_of_one_text_has_no_interval() -> None:
    curves = Curves(np.array([0, 4]), 8, {"one": np.zeros((1, 2, 1))})
    assert [line.get_marker() for line in curves.plot(allowed=0.1).lines].count("|") == 0


def test_curves_that_continue_others_are_dashed_in_their_color() -> None:
    first = Curves(np.array([0, 2]), 8, {name: np.ones((1, 2, 2)) for name in ("a", "a, b", "z")})
    second = Curves(
        np.array([0, 2]), 8, {f"{name}, later": np.ones((1, 2, 2)) for name in ("a, b", "y")}
    )
    lines = {line.get_label(): line for line in first.plot(second).lines}
    assert [line.get_linestyle() for line in lines.values()] == ["-", "-", "-", "--", "--"]
    colors = {name: to_hex(line.get_color()) for name, line in lines.items()}
    assert colors["a, b, later"] == colors["a, b"]
    assert len(set(colors.values())) == 4


@pytest.mark.parametrize("ending", [".svg", ".png", ".pdf"])
def test_a_figure_is_saved_the_same_each_time_and_closed(ending: str, tmp_path: Path) -> None:
    files = []
    for name in ("one", "two"):
        ax = _curves({HOSTILE: 1, "random": 5}).plot(allowed=0.5)
        files.append(save_figure(ax, tmp_path / f"{name}{ending}").read_bytes())
    assert files[0] == files[1]
    assert plt.get_fignums() == []


@pytest.mark.full
def test_names_are_drawn_as_they_are(tmp_path: Path) -> None:
    axes = [_curves({HOSTILE: 1}).plot(allowed=0.5), _table(np.ones(15)).plot(HOSTILE)]
    for ax in axes:
        root = ElementTree.parse(save_figure(ax, tmp_path / "figure.svg")).getroot()
        drawn = [text.text or "" for text in root.iter("{http://www.w3.org/2000/svg}text")]
        assert any(
            "<script>alert('1')</script> $x_1 & \N{REPLACEMENT CHARACTER}[31m" in text
            for text in drawn
        )
        assert not [tag for tag in root.iter() if tag.tag.endswith("script")]


def test_bad_arguments_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = _scores(np.ones((1, 15)))
    with pytest.raises(ArgumentError, match="ax is of the type Figure"):
        scores.plot(ax=plt.figure())
    with pytest.raises(ArgumentError, match="kind='bars'"):
        scores.plot(kind="bars")
    with pytest.raises(ArgumentError, match="no statistic 'heat'"):
        _table(np.ones(15)).plot("heat")
    with pytest.raises(ArgumentError, match=r"figure\.gif does not end in \.svg, \.png, \.pdf"):
        save_figure(scores.plot(), tmp_path / "figure.gif")
    with pytest.raises(OutputError, match="missing"):
        save_figure(scores.plot(), tmp_path / "missing" / "figure.svg")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.pyplot", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'headwise\[plot\]'"):
        scores.plot()
    assert not list(tmp_path.iterdir())
