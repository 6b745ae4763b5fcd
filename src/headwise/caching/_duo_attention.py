"""Plans as pattern files of DuoAttention, which other tools read."""

import json
import warnings
from pathlib import Path

import numpy as np

from headwise._display import first_line
from headwise.caching._plan import CachePlan, LayerCachePlan
from headwise.errors import ArgumentError, InputError
from headwise.files import as_path, build_from, files_beside, make_folder, read_object

_TABLE, _SETTINGS = "full_attention_heads.tsv", "config.json"
_LARGEST = 1 << 22  # bytes of a table; the published ones have a few thousand


def save_duo_attention(plan: CachePlan, folder: str | Path) -> Path:
    """Write a plan as a pattern of DuoAttention: a table and a `config.json` in a folder.

    A row for each layer, a column for each kv head. Heads that keep all tokens have a value from
    ½ to 1, others one below ½, in the order of their scores: both a threshold of ½ and the share
    of the plan give the same heads.

    Raises:
        ArgumentError: windows of several sizes, or layers with different numbers of kv heads,
            which the format does not have.
        OutputError: the folder cannot be written.
    Source:
        `load_attn_pattern` of DuoAttention's code (Xiao et al. 2024, arXiv:2410.10819).
    """
    sizes = {window for layer in plan.layers for window in layer.windows if window is not None}
    counts = {len(layer.windows) for layer in plan.layers}
    if len(sizes) > 1 or len(counts) > 1:
        raise ArgumentError(
            f"save_duo_attention: windows {sorted(sizes)} and {sorted(counts)} kv heads. The "
            f"format has one window and one number of kv heads: plan with window= of one size."
        )
    losses = [loss for layer in plan.layers for loss in layer.losses or [0.0] * len(layer.windows)]
    ranks = np.argsort(np.argsort(losses, kind="stable"), kind="stable") / (2 * len(losses))
    is_full = [window is None for layer in plan.layers for window in layer.windows]
    values = (ranks + 0.5 * np.array(is_full)).reshape(len(plan.layers), -1)
    rows = ["\t".join(f"{value:.6f}" for value in row) for row in values]
    settings = {"sink_size": plan.sinks, "recent_size": min(sizes, default=1)}
    folder = make_folder(folder, "save_duo_attention")
    with files_beside(folder, last=_SETTINGS) as new:
        (new / _TABLE).write_text("\n".join(rows) + "\n", "utf-8")
        (new / _SETTINGS).write_text(json.dumps(settings) + "\n", "utf-8")
    return folder


def load_duo_attention(folder: str | Path, keep: float | None = None) -> CachePlan:
    """Read a pattern of DuoAttention as a plan, for any model with as many layers and kv heads.

    Args:
        folder: A folder with `full_attention_heads.tsv` and `config.json`.
        keep: The largest share of kv heads that keep all tokens. None keeps those from ½ on.
    Raises:
        ArgumentError: `keep` is not between 0 and 1.
        InputError: a file is missing or holds something else, such as a window below 1.
    """
    if keep is not None and not 0 <= keep <= 1:
        raise ArgumentError(f"load_duo_attention: keep={keep!r}. Give a share from 0 to 1.")
    caller = "load_duo_attention"
    folder = as_path(caller, folder)
    advice = f"Give a folder with {_TABLE} and {_SETTINGS}."
    settings = read_object(folder / _SETTINGS, caller, advice, "holds no pattern")
    values = np.clip(_read_table(folder / _TABLE, advice), 0, 1)
    order = np.argsort(-values, axis=None, kind="stable")
    n_full = int((values >= 0.5).sum()) if keep is None else int(keep * values.size + 1e-9)
    full = np.zeros(values.size, dtype=bool)
    full[order[:n_full]] = True
    return build_from(
        lambda: _plan(full.reshape(values.shape), settings["sink_size"], settings["recent_size"]),
        f"{caller}: {folder / _SETTINGS} holds no pattern",
        advice,
    )


def _plan(full: np.ndarray, sinks: int, window: int) -> CachePlan:
    layers = (
        LayerCachePlan(layer, tuple(None if is_full else window for is_full in row))
        for layer, row in enumerate(full.tolist())
    )
    return CachePlan(tuple(layers), sinks, why="a pattern of DuoAttention")


def _read_table(path: Path, advice: str) -> np.ndarray:
    try:
        if path.stat().st_size > _LARGEST:  # checked before memory is taken
            raise ValueError(f"it has {path.stat().st_size} bytes, more than {_LARGEST}")
        lines = path.read_text("utf-8").splitlines()
        with warnings.catch_warnings(action="error"):  # NumPy warns of a table without numbers
            table = np.loadtxt(lines, delimiter="\t", comments=None, ndmin=2)
        if not np.isfinite(table).all():
            raise ValueError("some numbers are not finite")
    except (OSError, ValueError, UserWarning) as error:
        raise InputError(
            f"load_duo_attention: {path} cannot be read ({first_line(error)}). {advice}"
        ) from error
    return table
