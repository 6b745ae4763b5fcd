"""A language model whose heads write for and against an answer by construction."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.layer import MultiHeadAttention

ANSWERS, FILLERS = 7, 5
# Token ids: cues for the right answer, cues for the other one, answers, fillers, and the end.
RIGHT, OTHER, ANSWER, FILLER = 0, ANSWERS, 2 * ANSWERS, 3 * ANSWERS
END = FILLER + FILLERS
WIDTH = ANSWERS + FILLERS + 3
# By head, the cue that it attends to and how strongly it writes the answer of the cue.
PLANTED = {"L0.H1": ("right", 0.8), "L1.H0": ("right", 0.6), "L1.H3": ("right", -0.5),
           "L1.H4": ("other", 0.6)}  # fmt: skip
KINDS = {
    name: "writer" if (cue == "right") == (strength > 0) else "canceller"
    for name, (cue, strength) in PLANTED.items()
}


class PlantedWriters(nn.Module):
    """Two layers of five heads; those that are not planted are random, and write as much."""

    def __init__(self, seed: int = 0, heads: int = 5) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.tokens = nn.Embedding(END + 1, WIDTH)
        self.layers = nn.ModuleList(
            MultiHeadAttention(WIDTH, heads, head_dim=3, v_head_dim=ANSWERS) for _ in range(2)
        )
        self.norm = nn.RMSNorm(WIDTH)
        self.unembedding = nn.Linear(WIDTH, END + 1, bias=False)
        eye = torch.eye(WIDTH)
        is_right, is_other, is_end = WIDTH - 3, WIDTH - 2, WIDTH - 1
        with torch.no_grad():
            answers = eye[:ANSWERS]
            fillers, end = eye[ANSWERS : ANSWERS + FILLERS], eye[[is_end]]
            cues = [answers + eye[is_right], answers + eye[is_other]]
            self.tokens.weight.copy_(torch.cat([*cues, 0 * answers, fillers, end]))
            self.unembedding.weight.zero_()[ANSWER:FILLER] = answers
            for number, layer in enumerate(self.layers):
                for weight in layer.parameters():
                    weight.normal_(std=WIDTH**-0.5, generator=generator)
                for name, (cue, strength) in PLANTED.items():
                    if not name.startswith(f"L{number}"):
                        continue
                    head = int(name[-1])
                    query, key, value = (
                        part.weight.view(heads, -1, WIDTH)[head].zero_()
                        for part in (layer.q_proj, layer.k_proj, layer.v_proj)
                    )
                    query[0, is_end] = 20.0
                    key[0, is_right if cue == "right" else is_other] = 1.0
                    value.copy_(answers)
                    out = layer.out_proj.weight.view(WIDTH, heads, ANSWERS)[:, head]
                    out.zero_()[:ANSWERS] = strength * torch.eye(ANSWERS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.tokens(input_ids)
        for layer in self.layers:
            x = x + layer(x, causal=True)
        logits: Tensor = self.unembedding(self.norm(x))
        return logits


def cued(n: int, seed: int = 0) -> list[tuple[Sequence[int], int, int]]:
    """Texts of two cues among fillers, with the answers of both; a cue is right by its kind."""
    rng = np.random.default_rng(seed)
    examples = []
    for _ in range(n):
        right, other = rng.permutation(ANSWERS)[:2].tolist()
        fillers = rng.integers(FILLER, END, rng.integers(2, 9)).tolist()
        ids = rng.permutation([RIGHT + right, OTHER + other, *fillers]).tolist()
        examples.append(([*ids, END], ANSWER + right, ANSWER + other))
    return examples


def exchanged(
    examples: Sequence[tuple[Sequence[int], int, int]], seed: int = 0
) -> list[tuple[Sequence[int], int, int]]:
    """The same texts, with the two answers of each exchanged at random."""
    swaps = np.random.default_rng(seed).integers(2, size=len(examples)).tolist()
    return [
        (ids, other, right) if swap else (ids, right, other)
        for (ids, right, other), swap in zip(examples, swaps, strict=True)
    ]


def discoveries(draws: int) -> dict[str, float]:
    """What is found in models of other random heads, with other examples: the recall of planted
    heads, the share of false discoveries, and in which share of the models any head is found where
    answers are exchanged at random."""
    right = false = alarms = 0
    for seed in range(draws):
        model, examples = PlantedWriters(seed), cued(40, seed)
        found = hw.effects(model, examples, total=None, seed=seed).found()
        kinds = dict(zip(found["name"], found["kind"], strict=True))
        right += sum(kinds.get(name) == kind for name, kind in KINDS.items())
        false += sum(KINDS.get(name) != kind for name, kind in kinds.items())
        random = hw.effects(model, exchanged(examples, seed), total=None, seed=seed)
        alarms += len(random.found()) > 0
    return {
        "recall": right / (draws * len(KINDS)),
        "false": false / max(1, right + false),
        "alarms": alarms / draws,
    }
