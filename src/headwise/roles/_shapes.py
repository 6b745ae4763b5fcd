"""Shapes of attention, apart from roles: heads that are sinks, and heads that attend to all alike.

A sink takes much of the attention of every query whatever the text says. It is empty if the head
reads next to nothing there, weighted by the values; otherwise it broadcasts one message to all.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from headwise._display import counted
from headwise.roles._hypotheses import lift
from headwise.roles.relations import DIFFUSE, DIFFUSE_BESIDE_SINKS, SHAPES, SINKS
from headwise.tables import Head

_BAR = 0.25  # of lift, for a sink
_MOST = 0.5  # of its attention, for what a head is said to do
EMPTY, BROADCASTING = "empty", "broadcasting"
_LENGTH_COLUMNS = ("short", "long", "by_length", "by_length.low", "by_length.high")
COLUMNS = (
    *("name", "stack", "layer", "head", "shape", "token", "attention", "ci_low", "ci_high"),
    *("value", "carries", *_LENGTH_COLUMNS, "evenness", "evenness_beside_sinks"),
)


def is_shape(roles: pd.Series) -> pd.Series:
    """Which rows of a table are about a shape of attention and not about a role."""
    return roles.isin(SHAPES)


def shape_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """A row per head that has a shape, from the rows of all tests."""
    shapes = []
    for name, of_head in rows[is_shape(rows["role"])].groupby("name", sort=False):
        by_role = {row["role"]: row for row in of_head.to_dict("records")}
        shape = _shape_of(by_role)
        if shape:
            first = next(iter(by_role.values()))
            place = {"name": name} | {key: first[key] for key in ("stack", "layer", "head")}
            shapes.append(place | shape)
    return pd.DataFrame(shapes, columns=list(COLUMNS))


def _shape_of(by_role: Mapping[str, Mapping[Any, Any]]) -> dict[str, Any]:
    """The shape of one head; empty without one."""
    sinks = [by_role[token] for token in SINKS if token in by_role and by_role[token]["found"]]
    even = by_role.get(DIFFUSE)
    beside = by_role.get(DIFFUSE_BESIDE_SINKS)
    spread = beside if sinks else even
    parts = ["sink"] * bool(sinks) + ["diffuse"] * bool(spread is not None and spread["found"])
    if not parts:
        return {}
    shape: dict[str, Any] = {"shape": " + ".join(parts), "token": "", "carries": ""}
    shape["evenness"] = np.nan if even is None else even["effect"]
    shape["evenness_beside_sinks"] = np.nan if beside is None else beside["effect"]
    if sinks:
        sink = max(sinks, key=lambda row: row["effect"])
        shape["token"] = " and ".join(row["role"] for row in sinks)
        shape["attention"] = sink["effect"]
        shape |= {key: sink[key] for key in ("ci_low", "ci_high", "value")}
        shape |= {key: sink.get(key, np.nan) for key in _LENGTH_COLUMNS}
        shape["carries"] = _carries(sink)
    return shape


def main_roles(found: pd.DataFrame, shapes: pd.DataFrame) -> pd.DataFrame:
    """A row for each head whose attention mostly goes to a role: half of it, and not to a sink.

    Beating every null takes little attention: a head may have found roles, and still spend most of
    its attention elsewhere.

    Args:
        found: The rows of roles that heads have, from the largest lift down.
    """
    on_sink = found["name"].map(shapes.set_index("name")["attention"]).fillna(0.0)
    is_most = found["effect"] >= np.maximum(on_sink.astype(float), _MOST)
    return found[is_most].drop_duplicates("name")


def categories_of(found: pd.DataFrame, shapes: pd.DataFrame) -> dict[Head, tuple[str, float]]:
    """The role that a map of heads shows, and its lift; 0 where a sink takes most instead."""
    main = main_roles(found, shapes)
    weak = found[~found["name"].isin(main["name"])].drop_duplicates("name")
    beside = weak["name"].isin(shapes["name"])
    shown = pd.concat([main, weak.assign(lift=weak["lift"].where(~beside, 0.0))])
    rows = shown.sort_index().to_dict("records")
    return {Head.parse(row["name"]): (row["role"], row["lift"]) for row in rows}


def _carries(sink: Mapping[Any, Any]) -> str:
    """Whether the sink would be one weighted by the values; "" where values are unknown."""
    value, baseline = sink["value"], sink["baseline"]
    if value != value:
        return ""
    reaches = lift(np.array([value]), np.array([baseline]))[0] >= _BAR
    return BROADCASTING if reaches else EMPTY


def shape_line(row: Mapping[Any, Any]) -> str:
    """A sentence part that describes the shape of a head with its numbers."""
    parts = [row["shape"]]
    if row["attention"] == row["attention"]:
        carried = f", {row['value']:.2f} weighted by value norm" if row["carries"] else ""
        parts.append(
            f"{row['attention']:.2f} [{row['ci_low']:.2f}, {row['ci_high']:.2f}] of its attention "
            f"on the {row['token']}{carried}" + (f" ({row['carries']})" if carried else "")
        )
        if row["short"] == row["short"]:
            parts.append(
                f"{row['short']:.2f} in the shortest third of the texts, {row['long']:.2f} in "
                f"the longest"
            )
    if "diffuse" in row["shape"]:
        beside = row["attention"] == row["attention"]
        evenness = row["evenness_beside_sinks" if beside else "evenness"]
        where = " beside the sink" if beside else ""
        parts.append(f"{evenness:.2f} of the entropy of uniform attention{where}")
    return f"{parts[0]}: {'; '.join(parts[1:])}"


def shapes_summary(shapes: pd.DataFrame) -> str:
    """How many heads are sinks and how many diffuse, in a clause; empty without any."""
    is_sink = shapes["shape"].str.contains("sink")
    diffuse = shapes["shape"].str.contains("diffuse")
    parts = []
    if is_sink.any():
        empty, known = (shapes["carries"] == EMPTY).sum(), (shapes["carries"] != "").sum()
        of_which = f", {empty} of them empty by value" if known else ""
        are = "is a sink" if is_sink.sum() == 1 else "are sinks"
        parts.append(f"{counted(int(is_sink.sum()), 'head')} {are}{of_which}")
    if diffuse.any():
        parts.append(
            f"{counted(int(diffuse.sum()), 'head')} "
            f"{'attends' if diffuse.sum() == 1 else 'attend'} diffusely"
        )
    return "; ".join(parts)


def signs_of(shapes: pd.DataFrame) -> dict[Head, tuple[str, str]]:
    """The sign of each sink and diffuse head on a map of heads, and what it means."""
    return {
        Head.parse(row["name"]): ("○", "sink") if "sink" in row["shape"] else ("≈", "diffuse")
        for row in shapes.to_dict("records")
    }
