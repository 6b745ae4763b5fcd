"""The smallest Llama that retrieves pass keys and key–value pairs, trained on the spot.

Filler is drawn from a fixed Markov chain, so that heads that look nearby have something to do.
Statements are planted in it: `PASS` and a code, or `PAIR`, a key and its value. A statement that
is repeated is a question: all that follows its cue can be read from its first occurrence.

    OMP_NUM_THREADS=1 python -m benchmarks.evidence._retrieval --into FOLDER
"""

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

BOS, PASS, PAIR = 1, 2, 3
KEYS, VALUES, FILLER = range(8, 72), range(72, 136), range(136, 192)
N_TOKENS = 192
CODE = 4  # tokens of a pass key
VALUE = 2  # tokens of a value
SUCCESSORS = 4  # likely successors of each filler token
IGNORED = -100
# Lengths of the texts, shortest first, and the texts of each step.
CURRICULUM = ((48, 48), (96, 32), (192, 16), (384, 12), (768, 8), (1536, 4), (4096, 2))
LEARNED = 0.95  # accuracy of answers at which longer texts follow
RATE, WARM_UP = 2e-3, 100


@dataclass(frozen=True)
class RetrievalTexts:
    """Texts of one length; labels are ignored but for the tokens that an answer consists of."""

    ids: Tensor
    labels: Tensor

    def batch(self) -> dict[str, Tensor]:
        """The inputs of a causal model."""
        return {"input_ids": self.ids, "labels": self.labels}

    def __len__(self) -> int:
        return len(self.ids)


def training_texts(n: int, length: int, rng: torch.Generator) -> RetrievalTexts:
    """Texts with statements all over, most of them repeated: many answers in each text."""
    return _stacked([_dense_text(length, rng) for _ in range(n)])


def question_texts(
    n: int, length: int, seed: int, kind: str = "pairs", n_pairs: int = 16
) -> RetrievalTexts:
    """Texts of filler with statements anywhere in them, and one question as their last tokens.

    Args:
        kind: "pairs" asks for one of `n_pairs` values, "pass" for the one pass key.
    """
    rng = torch.Generator().manual_seed(seed)
    return _stacked([_question_text(length, kind, n_pairs, rng) for _ in range(n)])


@torch.no_grad()
def accuracy(logits: Tensor, labels: Tensor) -> float:
    """The share of texts whose answer is right in every token."""
    asked = labels[:, 1:] != IGNORED
    right = (logits[:, :-1].argmax(-1) == labels[:, 1:]) | ~asked
    return float(right.all(-1).float().mean())


def new_model(seed: int = 0) -> LlamaForCausalLM:
    """Four layers of four heads, 0.7 million weights."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=N_TOKENS, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=16384,
            bos_token_id=BOS, eos_token_id=None, pad_token_id=0,
        )
    )  # fmt: skip


def train(minutes: float = 20, seed: int = 0, log: Path | None = None) -> LlamaForCausalLM:
    """Train on texts of growing length; the last length takes what is left of the CPU time."""
    model, rng, start = new_model(seed), torch.Generator().manual_seed(seed), time.process_time()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)
    stages, smooth, stage, step, steps_here = CURRICULUM, 0.0, 0, 0, 0
    while (share := (time.process_time() - start) / (60 * minutes)) < 1:
        for group in optimizer.param_groups:
            decay = 0.05 + 0.95 * (1 + math.cos(math.pi * share)) / 2
            group["lr"] = RATE * min(1, (step + 1) / WARM_UP) * decay
        length, n = stages[stage]
        loss, score = _step(model, optimizer, training_texts(n, length, rng))
        smooth = 0.95 * smooth + 0.05 * score
        step, steps_here = step + 1, steps_here + 1
        if log is not None and step % 50 == 0:
            minute = (time.process_time() - start) / 60
            with log.open("a") as file:
                print(f"{minute:.1f} min {step} {length=} {loss=:.3f} {smooth=:.3f}", file=file)
        if smooth > LEARNED and stage + 1 < len(stages) and steps_here >= 40:
            stage, smooth, steps_here = stage + 1, 0.0, 0
    return model.eval()


def _step(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, texts: RetrievalTexts
) -> tuple[float, float]:
    """One step; the loss of answers, and the share of their tokens that is right."""
    logits = model(input_ids=texts.ids, use_cache=False).logits[:, :-1]
    ids, labels = texts.ids[:, 1:], texts.labels[:, 1:]
    asked = labels != IGNORED
    losses = F.cross_entropy(logits.mT, ids, reduction="none")
    answers = losses[asked].mean()
    loss = answers + 0.3 * losses[~asked].mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    right = (logits.argmax(-1) == ids)[asked].float().mean()
    return answers.item(), right.item()


def _stacked(rows: list[tuple[list[int], list[int]]]) -> RetrievalTexts:
    return RetrievalTexts(
        torch.tensor([ids for ids, _ in rows]), torch.tensor([lab for _, lab in rows])
    )


def _numbers(choices: range, n: int, rng: torch.Generator) -> list[int]:
    return torch.randint(choices.start, choices.stop, (n,), generator=rng).tolist()


def _filler(rng: torch.Generator) -> Iterator[int]:
    """A walk over the filler tokens; each has a few likely successors, the same in all texts."""
    token = _numbers(FILLER, 1, rng)[0]
    while True:
        for choice in torch.randint(0, SUCCESSORS, (256,), generator=rng).tolist():
            yield token
            token = FILLER.start + (5 * (token - FILLER.start) + 11 * choice + 3) % len(FILLER)


def _dense_text(length: int, rng: torch.Generator) -> tuple[list[int], list[int]]:
    """Statements at random places; most of them repeat an earlier one.

    Half of the longer texts have none in their middle third, so that answers are far away.
    """
    how_dense = float(torch.rand((), generator=rng))
    density, silent = 0.7, range(0)  # of tokens in statements
    if length >= 200:
        density = 0.01 * 44**how_dense
        if torch.rand((), generator=rng) < 0.5:
            silent = range(length // 3, 2 * length // 3)
    n_keys = max(2, min(32, length // 24))
    keys = [KEYS[i] for i in torch.randperm(len(KEYS), generator=rng)[:n_keys].tolist()]
    said: dict[int, list[int]] = {}
    filler, ids, labels = _filler(rng), [BOS], [IGNORED]
    chance = density / (4 - 3 * density)
    draws = torch.rand(length, 2, generator=rng).tolist()
    for start, which in draws:
        if len(ids) >= length:
            break
        if len(ids) in silent or (start > chance and len(ids) < length - 16):
            ids.append(next(filler))
            labels.append(IGNORED)
            continue
        cue = PASS if which < 0.15 else keys[int(which * 1e6) % n_keys]
        answer = said.get(cue)
        tokens = said.setdefault(cue, _numbers(VALUES, CODE if cue == PASS else VALUE, rng))
        head = [PASS] if cue == PASS else [PAIR, cue]
        ids += head + tokens
        labels += [IGNORED] * len(head) + ([IGNORED] * len(tokens) if answer is None else tokens)
    return ids[:length], labels[:length]


def _question_text(
    length: int, kind: str, n_pairs: int, rng: torch.Generator
) -> tuple[list[int], list[int]]:
    if kind == "pass":
        statements = [([PASS], _numbers(VALUES, CODE, rng))]
    else:
        order = torch.randperm(len(KEYS), generator=rng)[:n_pairs].tolist()
        statements = [([PAIR, KEYS[i]], _numbers(VALUES, VALUE, rng)) for i in order]
    cue, answer = statements[int(torch.randint(len(statements), (), generator=rng))]
    stated = sum(len(head) + len(tokens) for head, tokens in statements)
    n_filler = length - 1 - stated - len(cue) - len(answer)
    places = sorted(torch.randint(0, n_filler + 1, (len(statements),), generator=rng).tolist())
    filler = _filler(rng)
    ids, at = [BOS], 0
    for place, (head, tokens) in zip(places, statements, strict=True):
        ids += [next(filler) for _ in range(place - at)] + head + tokens
        at = place
    ids += [next(filler) for _ in range(n_filler - at)] + cue + answer
    return ids, [IGNORED] * (length - len(answer)) + answer


@torch.no_grad()
def scores(model: LlamaForCausalLM, length: int, n: int = 50, seed: int = 1) -> dict[str, float]:
    """The accuracy of a model on held-out texts, by kind of question."""
    results = {}
    for kind in ("pairs", "pass"):
        texts = question_texts(n, length, seed, kind)
        right = [
            accuracy(model(input_ids=texts.ids[i : i + 1]).logits, texts.labels[i : i + 1])
            for i in range(n)
        ]
        results[kind] = sum(right) / n
    return results


def main() -> None:
    """Train a model and save it, with its accuracy on held-out texts printed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=20, help="of CPU time")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.into.parent.mkdir(parents=True, exist_ok=True)
    model = train(args.minutes, args.seed, args.into.with_suffix(".log"))
    beside = args.into.with_suffix(".part")
    model.save_pretrained(beside)
    beside.rename(args.into)
    for length in (256, 1024, 4096):
        print(length, scores(model, length), flush=True)


if __name__ == "__main__":
    main()
