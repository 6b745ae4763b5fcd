"""The worked example: one query, heads that look at it differently, and what comes of it.

The weights and values are given by hand, so that every figure can be checked with a pencil. An
example of your own can be read from two small JSON files.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as brief
from typing import Any

import numpy as np
from jaxtyping import Float

from headwise.errors import InputError
from headwise.files import read_json

__all__ = ["WorkedExample", "load_example", "mixing_matrix", "worked_example"]

TOLERANCE = 0.001
"""How far from 1 the weights of a head may sum, so that rounded ones can be written down."""

_TOKENS = ("The", "animal", "crossed", "the", "road", "because", "it", "was", "tired")
_WEIGHTS = (
    {"animal": 0.70, "road": 0.05, "because": 0.10, "was": 0.05, "tired": 0.10},
    {"animal": 0.20, "road": 0.05, "because": 0.05, "was": 0.15, "tired": 0.55},
)
_VALUES = {
    "animal": [0.8, 0.1, 0.0, 0.2],
    "road": [0.1, 0.7, 0.1, 0.0],
    "because": [0.2, 0.2, 0.6, 0.1],
    "was": [0.1, 0.1, 0.2, 0.8],
    "tired": [0.3, 0.6, 0.1, 0.2],
}
_FORM = '{"tokens": "I work", "query": "work", "heads": [{"I": 0.8, "work": 0.2}, [0.5, 0.5]]}'


@dataclass(frozen=True, eq=False)
class WorkedExample:
    """How one query is answered: the weights of each head, the values, and every step from there.

    `query` is the query's position among the tokens, from 0. A token that gets no weight may
    have zeros for its value. d_model is H · Dv.
    """

    tokens: tuple[str, ...]
    query: int
    weights: Float[np.ndarray, "H S"]
    values: Float[np.ndarray, "H S Dv"]

    @property
    def heads(self) -> Float[np.ndarray, "H Dv"]:
        """What each head says: the values, each times its weight, added up."""
        return np.einsum("hs,hsd->hd", self.weights, self.values)

    @property
    def concat(self) -> Float[np.ndarray, " d_model"]:
        """The heads laid side by side."""
        return self.heads.reshape(-1)

    @property
    def out(self) -> Float[np.ndarray, " d_model"]:
        """The output when `W_O` is the identity: the heads stay apart."""
        return self.concat @ np.eye(self.concat.size)

    @property
    def W_mix(self) -> Float[np.ndarray, "d_model d_model"]:
        """A `W_O` that mixes the heads. See `mixing_matrix`."""
        return mixing_matrix(*self.heads.shape)

    @property
    def out_mixed(self) -> Float[np.ndarray, " d_model"]:
        """The output when `W_O` is `W_mix`: every feature reads every head."""
        return self.concat @ self.W_mix


def mixing_matrix(n_heads: int, head_dim: int) -> Float[np.ndarray, "d_model d_model"]:
    """Make a `W_O` of ones, minus ones and zeros through which every feature reads every head.

    The first `head_dim` features are the sum of the heads. Each further block is the same sum
    with one head counted negatively, so two heads give their sum and their difference.
    """
    signs = np.ones((n_heads, n_heads))
    signs[range(1, n_heads), range(1, n_heads)] = -1
    return np.kron(signs, np.eye(head_dim)) + 0.0  # no minus zeros


def worked_example() -> WorkedExample:
    """Return the example of the documentation: what *it* attends to, in two heads of width 4.

    Head 1 asks what *it* stands for, head 2 what is said of it; both read the same values.
    """
    weights = np.array([[head.get(token, 0.0) for token in _TOKENS] for head in _WEIGHTS])
    values = np.array([_VALUES.get(token, [0.0] * 4) for token in _TOKENS])
    return WorkedExample(_TOKENS, _TOKENS.index("it"), weights, np.stack([values, values]))


def load_example(
    weights_path: Path | None = None, values_path: Path | None = None
) -> WorkedExample:
    """Read an example of your own; what is not given comes from `worked_example`.

    The weights file holds an object: `tokens` (a list, or a sentence to split at blanks), `query`
    (a token, or its position from 0) and `heads` (for each head a list with a weight per token,
    or an object from tokens to weights where tokens left out get 0). The values file holds rows
    of numbers: a list with a row per token, or an object from tokens to rows; or a list of such,
    one per head. A token that gets no weight needs no value in an object.

    Raises:
        InputError: a file cannot be read or is not of that form, weights are negative or do not
            sum to 1 within 0.001, or values are missing or differ in width.
    """
    example = worked_example()
    tokens, query, weights = example.tokens, example.query, example.weights
    if weights_path is not None:
        tokens, query, weights = _read_weights(weights_path)
    if values_path is None:
        source = "explain" if weights_path is None else f"explain: {weights_path}"
        raw: Any = {token: row for token, row in _VALUES.items() if token in tokens}
    else:
        source, raw = str(values_path), _read_json(values_path)
    return WorkedExample(tokens, query, weights, _read_values(source, raw, tokens, weights))


def _read_json(path: Path) -> Any:
    return read_json(path, "explain", f"Write a JSON file like {_FORM}.")


def _read_weights(path: Path) -> tuple[tuple[str, ...], int, np.ndarray]:
    data = _read_json(path)
    if not isinstance(data, dict) or set(data) != {"tokens", "query", "heads"}:
        has = brief(sorted(data) if isinstance(data, dict) else data)
        raise InputError(
            f"{path}: {has}, not the keys tokens, query, heads. Write it like {_FORM}."
        )
    tokens = data["tokens"].split() if isinstance(data["tokens"], str) else data["tokens"]
    if not isinstance(tokens, list) or not tokens or not all(isinstance(t, str) for t in tokens):
        raise InputError(f"{path}: tokens {brief(tokens)}. Give a sentence or a list of strings.")
    heads = data["heads"]
    if not isinstance(heads, list) or not heads:
        raise InputError(f"{path}: heads {brief(heads)}. Give a list with one entry for each head.")
    query = _read_query(path, data["query"], tokens)
    rows = [_read_head(f"{path}: head {h}", head, tokens) for h, head in enumerate(heads, 1)]
    return tuple(tokens), query, np.array(rows)


def _read_query(path: Path, query: Any, tokens: Sequence[str]) -> int:
    if type(query) is int and 0 <= query < len(tokens):
        return query
    count = tokens.count(query)
    if count > 1:
        why = f"{path}: the query {brief(query)} stands {count} times among the tokens"
        raise InputError(f"{why}. Give its position, from 0.")
    if count == 0 or not isinstance(query, str):
        why = f"{path}: the query {brief(query)} is none of the {len(tokens)} tokens"
        raise InputError(f"{why}. Give one of them, or its position from 0.")
    return tokens.index(query)


def _read_head(where: str, head: Any, tokens: Sequence[str]) -> list[float]:
    """The weights of one head, one for each token."""
    if isinstance(head, dict):
        _check_known(where, head, tokens)
        for token in head:
            if tokens.count(token) > 1:
                why = f"{where}: {token!r} stands {tokens.count(token)} times among the tokens"
                raise InputError(f"{why}. Give this head as a list with a weight per token.")
        head = [head.get(token, 0.0) for token in tokens]
    weights = _read_numbers(where, head)
    if len(weights) != len(tokens):
        why = f"{where}: {len(weights)} weights for {len(tokens)} tokens"
        raise InputError(f"{why}. Give one for each token.")
    if min(weights) < 0:
        raise InputError(f"{where}: the weight {min(weights):g}. Weights are 0 or more.")
    total = math.fsum(weights)
    if abs(total - 1) > TOLERANCE:
        why = f"{where}: the weights sum to {total:g}"
        raise InputError(f"{why}. Make them sum to 1 (within {TOLERANCE}).")
    return weights


def _read_values(
    source: str, raw: Any, tokens: Sequence[str], weights: np.ndarray
) -> Float[np.ndarray, "H S Dv"]:
    """The values of every head; those that all heads share are repeated."""
    per_head = isinstance(raw, list) and bool(raw) and _is_table(raw[0])
    tables = raw if per_head else [raw] * len(weights)
    if len(tables) != len(weights):
        why = f"{source}: values for {len(tables)} heads, weights for {len(weights)}"
        raise InputError(f"{why}. Give one table for each head, or one that they share.")
    named = [_read_table(f"{source}: head {h}", t, tokens) for h, t in enumerate(tables, 1)]
    for h, s in zip(*np.nonzero(weights), strict=True):
        if s not in named[h]:
            why = f"{source}: head {h + 1} gives {tokens[s]!r} the weight {weights[h, s]:g}"
            raise InputError(f"{why}, but it has no value. Add it to the values file.")
    widths = sorted({len(row) for table in named for row in table.values()})
    if len(widths) > 1:
        raise InputError(f"{source}: rows of {widths} values. Make all of them equally wide.")
    nothing = [0.0] * widths[0]
    return np.array([[table.get(s, nothing) for s in range(len(tokens))] for table in named])


def _is_table(entry: Any) -> bool:
    """Whether this is the table of one head, not a token's row in a table that all share."""
    nested = isinstance(entry, list) and any(isinstance(row, list) for row in entry)
    return nested or isinstance(entry, dict)


def _read_table(where: str, table: Any, tokens: Sequence[str]) -> dict[int, list[float]]:
    """One head's rows by position; a token that is not named has none."""
    if isinstance(table, dict):
        _check_known(where, table, tokens)
        rows = {s: table[token] for s, token in enumerate(tokens) if token in table}
    elif isinstance(table, list) and len(table) == len(tokens):
        rows = dict(enumerate(table))
    else:
        has = f"{len(table)} rows of values" if isinstance(table, list) else brief(table)
        raise InputError(f"{where}: {has} for {len(tokens)} tokens. Give one row for each token.")
    return {s: _read_numbers(f"{where}, {tokens[s]!r}", row) for s, row in rows.items()}


def _check_known(where: str, named: Mapping[str, Any], tokens: Sequence[str]) -> None:
    for token in named:
        if token not in tokens:
            why = f"{where}: {token!r} is none of the {len(tokens)} tokens"
            raise InputError(f"{why}. Write it as it stands there, or leave it out.")


def _read_numbers(where: str, raw: Any) -> list[float]:
    if not isinstance(raw, list) or not raw:
        raise InputError(f"{where}: {brief(raw)}. Give a list of numbers.")
    for entry in raw:
        # True is an int to Python, and an int can be too long for a float.
        if type(entry) not in (int, float) or not abs(entry) < 1e300:
            raise InputError(f"{where}: {brief(entry)} among the numbers. Give finite numbers.")
    return [float(entry) for entry in raw]
