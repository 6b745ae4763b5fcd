"""Encoder-decoders trained on the spot, whose true alignment is known.

`speech` trains a tiny Whisper on words of synthetic tones: each word is a band of the spectrogram
for some frames, with silence between words. `transliteration` trains a tiny T5: two letters of the
source become one of the target, one becomes one, or one becomes three, in order.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from headwise.roles import AlignedBatch

BINS, POSITIONS = 24, 64  # of a spectrogram; two frames make one source position
BOS, EOS, FIRST_WORD, N_WORDS = 1, 2, 4, 20
LETTERS = range(4, 40)  # of the source; the same number of letters of the target follows
SILENT = LETTERS.stop + len(LETTERS)  # the second letter of a pair that is written as one
SECOND = (SILENT + 1, SILENT + 2)  # what is written after the first of three letters
CONTRACTED, EXPANDED = 0, 2  # kinds of letters; those of kind 1 are written one for one
Spans = list[list[tuple[int, int] | None]]


def speech_model(seed: int = 0) -> nn.Module:
    """Two layers of four heads in the encoder and in the decoder."""
    torch.manual_seed(seed)
    config = WhisperConfig(
        vocab_size=FIRST_WORD + N_WORDS, num_mel_bins=BINS, d_model=64, encoder_layers=2,
        decoder_layers=4, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=128, decoder_ffn_dim=128, max_source_positions=POSITIONS,
        max_target_positions=16, pad_token_id=0, bos_token_id=BOS, eos_token_id=EOS,
        decoder_start_token_id=BOS, suppress_tokens=None, begin_suppress_tokens=None,
        dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config)


def speech(n: int, seed: int) -> AlignedBatch:
    """Utterances of four to seven different words, with the borders of each word."""
    rng = torch.Generator().manual_seed(seed)
    features = 0.3 * torch.randn(n, BINS, 2 * POSITIONS, generator=rng)
    outputs: list[list[int]] = []
    spans: Spans = []
    for row in range(n):
        words = torch.randperm(N_WORDS, generator=rng)[: _between(4, 8, rng)].tolist()
        at, borders = _between(0, 6, rng), []
        for word in words:
            length = _between(6, 13, rng)
            features[row, word % BINS : word % BINS + 4, at : at + length] += 2.0
            borders.append((at // 2, (at + length + 1) // 2))
            at += length + _between(1, 5, rng)
        outputs.append([FIRST_WORD + word for word in words] + [EOS])
        spans.append([*borders, None])
    return AlignedBatch({"input_features": features}, outputs, spans)


def transliteration_model(seed: int = 0) -> nn.Module:
    """Two layers of four heads in the encoder and four in the decoder."""
    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=SECOND[-1] + 1, d_model=64, d_kv=16, d_ff=128, num_layers=2,
        num_decoder_layers=4, num_heads=4, dropout_rate=0.0, pad_token_id=0,
        decoder_start_token_id=0, eos_token_id=EOS,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def transliteration(n: int, seed: int) -> AlignedBatch:
    """Words of 8 to 13 units: two letters for one, one for one, or one for three, in order.

    Each half of a word prefers a kind of its own, so the place in the source does not follow from
    the place in the target. Letters that are written with three share the last two of them.
    """
    rng = torch.Generator().manual_seed(seed)
    sources, outputs = [], []
    spans: Spans = []
    for _ in range(n):
        source: list[int] = []
        target: list[int] = []
        borders: list[tuple[int, int] | None] = []
        for letter, kind in _units(rng):
            read = [letter, SILENT] if kind == CONTRACTED else [letter]
            written = [letter + len(LETTERS), *(SECOND if kind == EXPANDED else ())]
            borders += [(len(source), len(source) + len(read))] * len(written)
            source += read
            target += written
        sources.append([*source, EOS])
        outputs.append([*target, EOS])
        spans.append([*borders, None])
    ids = _padded(sources, 0)
    return AlignedBatch({"input_ids": ids, "attention_mask": (ids > 0).long()}, outputs, spans)


def _units(rng: torch.Generator) -> list[tuple[int, int]]:
    """Different letters, each with its kind: its number modulo 3."""
    length = _between(8, 14, rng)
    preferred = torch.randperm(3, generator=rng)[:2].tolist()
    shuffled = (torch.randperm(len(LETTERS), generator=rng) + LETTERS.start).tolist()
    chosen: list[int] = []
    for place in range(length):
        liked = torch.rand((), generator=rng) < 0.9
        wanted = preferred[2 * place // length] if liked else _between(0, 3, rng)
        chosen.append(next(x for x in shuffled if x % 3 == wanted and x not in chosen))
    return [(letter, letter % 3) for letter in chosen]


def train(model: nn.Module, task: Any, steps: int, size: int = 32, rate: float = 2e-3) -> float:
    """Train on fresh examples; returns the mean loss of the last 20 steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    warm, losses = max(1, steps // 10), []
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min((step + 1) / warm, (steps - step) / (steps - warm))
        batch = task(size, seed=1_000_000 + step)
        loss = model(**batch.inputs, labels=_padded(batch.outputs, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return sum(losses[-20:]) / len(losses[-20:])


def batches(task: Any, n: int, size: int = 20, seed: int = 0) -> Iterator[AlignedBatch]:
    """Held-out batches of `n` examples in all."""
    for number in range(n // size):
        yield task(size, seed=seed + number)


def _between(low: int, high: int, rng: torch.Generator) -> int:
    return int(torch.randint(low, high, (1,), generator=rng))


def _padded(rows: list[list[int]], value: int) -> Tensor:
    return nn.utils.rnn.pad_sequence(
        [torch.tensor(row) for row in rows], batch_first=True, padding_value=value
    )
