"""A plan lists removed and kept heads, and loads equal after saving."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from headwise import Head, Plan


@st.composite
def _plans(draw: st.DrawFn) -> Plan:
    sizes = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    heads = [Head("encoder", layer, head) for layer, n in enumerate(sizes) for head in range(n)]
    gone = [
        Head("encoder", layer, head)
        for layer, n in enumerate(sizes)
        for head in draw(st.sets(st.integers(0, n - 1), max_size=n - 1))
    ]
    return Plan.of(draw(st.permutations(gone)), heads, draw(st.text()), draw(st.text()))


@given(_plans())
def test_heads_go_or_stay(plan: Plan) -> None:
    for layer in plan.layers:
        assert sorted([*layer.remove, *layer.keep]) == list(range(layer.n_heads))
        assert layer.keep
    assert len(plan.removed) == sum(len(layer.remove) for layer in plan.layers)
    assert plan.uniform == (len({len(layer.keep) for layer in plan.layers}) == 1)


@given(plan=_plans())
def test_a_saved_plan_loads_equal(plan: Plan, tmp_path_factory: object) -> None:
    folder: Path = tmp_path_factory.mktemp("plan")  # type: ignore[attr-defined]
    assert Plan.load(plan.save(folder / "plan.json")) == plan
