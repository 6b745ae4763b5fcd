"""`headwise explain`: a worked example of two heads, step by step, or as JSON."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from headwise.cli._options import Json


def explain(as_json: Json = False) -> None:
    """Show a worked example of two heads, step by step."""
    from headwise.example import worked_example

    example = worked_example()
    if not as_json:
        for line in _steps(example):
            print(line)
        return
    facts = vars(example) | {"query": example.tokens[example.query]}
    # Rounded as people write them: 0.1 + 0.2 becomes 0.3. + 0.0 turns -0.0 into 0.0.
    lines = (
        f' "{name}": {json.dumps(fact, default=lambda array: (array.round(12) + 0.0).tolist())}'
        for name, fact in facts.items()
    )
    print("{\n" + ",\n".join(lines) + "\n}")


def _steps(example: Any) -> Iterator[str]:
    yield f"What 'it' attends to, in 2 heads of width 4: {' '.join(example.tokens)}"
    yield "\n1. Weights [2, 9]: how much, in each head"
    for h, weights in enumerate(example.weights):
        yield f"  Head {h + 1}"
        for token, weight, value in zip(example.tokens, weights, example.values[h], strict=True):
            bar, vector = "#" * round(20 * weight), _vector(value) if weight else ""
            yield f"  {token:9}{bar:20}  {_number(weight):5}{vector}".rstrip()
    yield "\n2. Heads [2, 4]: values times weights, added up"
    for h, head in enumerate(example.heads):
        yield f"  Head {h + 1}"
        for s in example.weights[h].nonzero()[0]:
            weight, value = _number(example.weights[h, s]), _vector(example.values[h, s])
            yield f"  + {weight:3} * {value:14} {example.tokens[s]}"
        yield f"  = {_vector(head)}"
    yield f"\n3. Concatenation [8]: side by side\n  {_vector(example.concat)}"
    yield f"\n4. W_O = identity [8, 8]: the heads stay apart\n  {_vector(example.out)}"
    yield f"\n5. W_O that mixes: the sum and the difference\n  {_vector(example.out_mixed)}"


def _vector(row: Iterable[float]) -> str:
    return "[" + " ".join(map(_number, row)) + "]"


def _number(x: float) -> str:
    return f"{x:.6g}".replace("0.", ".", 1)
