"""The worked example: multi-head attention of one query, step by step.

The weights and values are small round numbers, so that every step can be checked by hand. Your
own example can be read from two small JSON files.
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
"""The tolerance on the sum of a head's weights, so that files may hold rounded weights."""

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
_WHO = "explain"
_FORM = '{"tokens": "I work", "query": "work", "heads": [{"I": 0.8, "work": 0.2}, [0.5, 0.5]]}'
_VALUES_FORM = '{"animal": [0.8, 0.1], "road": [0.1, 0.7]}'


@dataclass(frozen=True, eq=False)
class WorkedExample:
    """The attention of one query: the weights of each head, the values, and every later step.

    `query` is the query's position among the tokens, from 0. A token without weight may have a
    value of zeros. d_model is H · Dv.
    """

    tokens: tuple[str, ...]
    query: int
    weights: Float[np.ndarray, "H S"]
    values: Float[np.ndarray, "H S Dv"]

    @property
    def heads(self) -> Float[np.ndarray, "H Dv"]:
        """The output of each head: the sum of the values times their weights."""
        return np.einsum("hs,hsd->hd", self.weights, self.values)

    @property
    def concat(self) -> Float[np.ndarray, " d_model"]:
        """The concatenated heads."""
        return self.heads.reshape(-1)

    @property
    def out(self) -> Float[np.ndarray, " d_model"]:
        """The output with the identity as `W_O`: the heads stay separate."""
        return self.concat @ np.eye(self.concat.size)

    @property
    def W_mix(self) -> Float[np.ndarray, "d_model d_model"]:
        """A `W_O` that mixes the heads. See `mixing_matrix`."""
        return mixing_matrix(*self.heads.shape)

    @property
    def out_mixed(self) -> Float[np.ndarray, " d_model"]:
        """The output with `W_mix` as `W_O`: every feature depends on every head."""
        return self.concat @ self.W_mix


def mixing_matrix(n_heads: int, head_dim: int) -> Float[np.ndarray, "d_model d_model"]:
    """Make a `W_O` of 1, −1 and 0 that makes every feature depend on every head.

    The first `head_dim` features are the sum of the heads. Each further block is the same sum
    with one head negated, so two heads give their sum and their difference.
    """
    signs = np.ones((n_heads, n_heads))
    signs[range(1, n_heads), range(1, n_heads)] = -1
    return np.kron(signs, np.eye(head_dim)) + 0.0  # no minus zeros


def worked_example() -> WorkedExample:
    """Return the example of the documentation: what *it* attends to, in two heads of width 4.

    Head 1 attends to the referent of *it*, head 2 to its description. Both use the same values.
    """
    weights = np.array([[head.get(token, 0.0) for token in _TOKENS] for head in _WEIGHTS])
    values = np.array([_VALUES.get(token, [0.0] * 4) for token in _TOKENS])
    return WorkedExample(_TOKENS, _TOKENS.index("it"), weights, np.stack([values, values]))


def load_example(
    weights_path: Path | None = None, values_path: Path | None = None
) -> WorkedExample:
    """Read your own example. A file left out is replaced by that part of `worked_example`.

    The weights file holds an object: `tokens` (a list, or a sentence to split at spaces), `query`
    (a token, or its position from 0) and `heads` (per head a list with one weight per token, or an
    object from tokens to weights, in which missing tokens get 0). The values file holds rows of
    numbers: a list with one row per token, or an object from tokens to rows; or a list of such,
    one per head. A token without weight needs no value in an object.

    Raises:
        InputError: a file cannot be read or has another form, weights are negative or do not
            sum to 1 within 0.001, or values are missing or differ in width.
    """
    example = worked_example()
    tokens, query, weights = example.tokens, example.query, example.weights
    if weights_path is not None:
        tokens, query, weights = _read_weights(weights_path)
    if values_path is None:
        source = _WHO if weights_path is None else f"{_WHO}: {weights_path}"
        raw: Any = {token: row for token, row in _VALUES.items() if token in tokens}
    else:
        source, raw = f"{_WHO}: {values_path}", _read_json(values_path, _VALUES_FORM)
    return WorkedExample(tokens, query, weights, _read_values(source, raw, tokens, weights))


def _read_json(path: Path, form: str) -> Any:
    return read_json(path, _WHO, f"Write a JSON file like {form}.")


def _read_weights(path: Path) -> tuple[tuple[str, ...], int, np.ndarray]:
    data, where = _read_json(path, _FORM), f"{_WHO}: {path}"
    if not isinstance(data, dict) or set(data) != {"tokens", "query", "heads"}:
        has = brief(sorted(data) if isinstance(data, dict) else data)
        raise InputError(
            f"{where} holds {has}, not the keys tokens, query and heads. Write it like {_FORM}."
        )
    tokens = data["tokens"].split() if isinstance(data["tokens"], str) else data["tokens"]
    if not isinstance(tokens, list) or not tokens or not all(isinstance(t, str) for t in tokens):
        raise InputError(f"{where}: tokens {brief(tokens)}. Give a sentence or a list of strings.")
    heads = data["heads"]
    if not isinstance(heads, list) or not heads:
        raise InputError(
            f"{where}: heads {brief(heads)}. Give a list with one entry for each head."
        )
    query = _read_query(where, data["query"], tokens)
    rows = [_read_head(f"{where}: head {h}", head, tokens) for h, head in enumerate(heads, 1)]
    return tuple(tokens), query, np.array(rows)


def _read_query(where: str, query: Any, tokens: Sequence[str]) -> int:
    if type(query) is int and 0 <= query < len(tokens):
        return query
    count = tokens.count(query)
    if count > 1:
        why = f"{where}: the query {brief(query)} occurs {count} times among the tokens"
        raise InputError(f"{why}. Give its position, from 0.")
    if count == 0 or not isinstance(query, str):
        why = f"{where}: the query {brief(query)} is not one of the {len(tokens)} tokens"
        raise InputError(f"{why}. Give one of them, or its position from 0.")
    return tokens.index(query)


def _read_head(where: str, head: Any, tokens: Sequence[str]) -> list[float]:
    """The weights of one head, one per token."""
    if isinstance(head, dict):
        _check_known(where, head, tokens)
        for token in head:
            if tokens.count(token) > 1:
                why = f"{where}: {token!r} occurs {tokens.count(token)} times among the tokens"
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
    """The values of every head; shared values are repeated."""
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
    """Whether this is the table of one head, and not a token's row in a shared table."""
    nested = isinstance(entry, list) and any(isinstance(row, list) for row in entry)
    return nested or isinstance(entry, dict)


def _read_table(where: str, table: Any, tokens: Sequence[str]) -> dict[int, list[float]]:
    """One head's rows by position; a token missing from an object has no row."""
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
            why = f"{where}: {token!r} is not one of the {len(tokens)} tokens"
            raise InputError(f"{why}. Use the exact token, or leave it out.")


def _read_numbers(where: str, raw: Any) -> list[float]:
    if not isinstance(raw, list) or not raw:
        raise InputError(f"{where}: {brief(raw)}. Give a list of numbers.")
    for entry in raw:
        # In Python, True is an int, and an int can be too large for a float.
        if type(entry) not in (int, float) or not abs(entry) < 1e300:
            raise InputError(f"{where}: {brief(entry)} among the numbers. Give finite numbers.")
    return [float(entry) for entry in raw]
