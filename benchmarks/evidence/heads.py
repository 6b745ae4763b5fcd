"""Heads that retrieve: a small Llama trained on key–value retrieval, and controls.

    OMP_NUM_THREADS=1 python -m benchmarks.evidence.heads --model FOLDER \\
        --into benchmarks/results/head-files.md

Each example asks for one of 16 pairs of a key and its value, anywhere among filler; the stretches
are the pairs, the query is the last token, and the answer is the value. FOLDER is a model that
`_retrieval.py` trained. The controls are the same model before training and with permuted weights.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers

import headwise as hw
from benchmarks._report import Row, machine, parser_of, print_rows, show, table
from benchmarks.evidence._retrieval import PAIR, VALUE, VALUES, new_model, question_texts
from headwise.roles import FoundHeads

LENGTHS = (256, 1024)
TITLES = ("model", "tokens", "found", "set", "right", "random heads", "best baseline",
          "answers right", "without the set", "without random heads")  # fmt: skip


def main() -> None:
    options = _arguments()
    torch.set_num_threads(1)
    rows = print_rows(_rows(options))
    text = f"{machine(options)}.\n\n{table(TITLES, [list(row.values()) for row in rows])}"
    show(text, options.into, "retrieval")


def examples(n: int, length: int, seed: int) -> list[hw.Example]:
    """Texts that end with a key; its pair is the right stretch, all other pairs are wrong."""
    texts = question_texts(n, length, seed)
    return [_example(ids) for ids in texts.ids.tolist()]


def _example(ids: list[int]) -> hw.Example:
    question, answer = ids[:-VALUE], ids[-VALUE:]
    starts = [
        place
        for place, token in enumerate(question[:-2])
        if token == PAIR and question[place + 2] in VALUES
    ]
    stretches = {start: (start, start + 2 + VALUE) for start in starts}
    right = [span for start, span in stretches.items() if question[start + 1] == question[-1]]
    wrong = [span for start, span in stretches.items() if question[start + 1] != question[-1]]
    return hw.Example(question, (len(question) - 1, len(question)), right, wrong, answer)


def _rows(options: argparse.Namespace) -> Iterator[Row]:
    trained = transformers.LlamaForCausalLM.from_pretrained(options.model).eval()
    models = {"trained": trained, "untrained": new_model(7).eval(), "permuted": _permuted(trained)}
    for length in LENGTHS:
        listed = examples(options.examples, length, 11)
        for name, model in models.items():
            found = hw.find_heads(model, listed)
            if name == "trained" and options.out:
                found.save(Path(options.out) / f"retrieval-{length}.json")
            yield {"model": name, "tokens": length, **_row(found)}


def _permuted(model: torch.nn.Module) -> torch.nn.Module:
    """The same model with the entries of every weight matrix shuffled, by a seed of its own."""
    weights, rng = model.state_dict(), torch.Generator().manual_seed(23)
    for name, weight in weights.items():
        if weight.ndim > 1:
            order = torch.randperm(weight.numel(), generator=rng)
            weights[name] = weight.flatten()[order].view_as(weight)
    copy = new_model().eval()
    copy.load_state_dict(weights)
    return copy


def _row(found: FoundHeads) -> Row:
    chosen, answers = found.set_row, found.answers
    assert answers is not None
    return {
        "found": ", ".join(found.found()["name"]) or "none",
        "set": f"{', '.join(map(str, found.heads))}: {chosen['outcome']}",
        "right": f"{chosen['effect']:.1%} [{chosen['ci_low']:.1%}, {chosen['ci_high']:.1%}]",
        "random heads": f"{chosen['null.heads']:.1%}",
        "best baseline": f"{chosen['baseline']:.1%} ({chosen['null']})",
        "answers right": f"{answers.accuracy:.1%}",
        "without the set": f"{answers.accuracy_without:.1%}",
        "without random heads": f"{answers.accuracy_random:.1%}",
    }


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--model", required=True, help="a folder that _retrieval.py wrote")
    parser.add_argument("--examples", type=int, default=200, help="half of them held out")
    parser.add_argument("--out", help="a folder for the files of heads")
    return parser.parse_args()


if __name__ == "__main__":
    main()
