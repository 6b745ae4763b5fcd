"""Alignments that cannot be computed are refused."""

import pytest
import torch
import transformers

import headwise as hw
from headwise.corpora import AnnotatedText
from headwise.errors import ArgumentError, HeadError, InputError, UnsupportedError
from headwise.roles import AlignedBatch, alignment
from planted import TOKENIZER
from planted_pairs import PlantedPairs, linked_pairs, sharp_t5, spelled

SOURCES, TARGETS = [[5, 9, 7, 3, 11, 4]], [[6, 2, 7]]


def test_bad_pairs_are_refused() -> None:
    model = sharp_t5()
    with pytest.raises(InputError, match="no word of 2 texts"):
        alignment(
            model, TOKENIZER, [AnnotatedText(text.text, text.words) for text in linked_pairs(2)]
        )
    source = {"input_ids": torch.tensor([SOURCES[0]])}
    with pytest.raises(ArgumentError, match="heads=None, and T5ForConditionalGeneration"):
        hw.align(model, source, TARGETS)
    with pytest.raises(HeadError, match=r"no head \(5, 0\)"):
        hw.align(model, source, TARGETS, heads=(5, 0))
    with pytest.raises(ArgumentError, match=r"heads=\[\]"):
        hw.align(model, source, TARGETS, heads=[])
    with pytest.raises(ArgumentError, match=r"outputs=\[6, 2, 7\]"):
        hw.align(model, source, TARGETS[0], heads=(0, 0))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="output 0 has 3 tokens with first=3"):
        hw.align(model, source, TARGETS, heads=(0, 0), first=3)
    batch = spelled(2, 0)
    for wrong, message in (
        (AlignedBatch(batch.inputs, batch.outputs, [[], []]), "spans of"),
        (AlignedBatch(batch.inputs, batch.outputs, [[(2, 2)] * len(o) for o in batch.outputs]),
         r"a span is \(2, 2\)"),
        (AlignedBatch(batch.inputs, batch.outputs, [[(0, 99)] * len(o) for o in batch.outputs]),
         "in a source of"),
        (AlignedBatch(batch.inputs, batch.outputs, batch.spans, first=1),
         "a span of an output before first=1"),
        (AlignedBatch(batch.inputs, batch.outputs, batch.spans, first=99),
         "output 0 has . tokens with first=99"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=message):
            hw.find_alignment_heads(PlantedPairs(), wrong)
    with pytest.raises(ArgumentError, match="most=0"):
        hw.find_alignment_heads(PlantedPairs(), batch, most=0)


def test_a_model_without_cross_attention_is_refused() -> None:
    torch.manual_seed(0)
    bert = transformers.BertConfig(
        hidden_size=24, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32,
        vocab_size=40,
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="has no function that shifts labels"):
        hw.align(
            transformers.BertModel(bert), {"input_ids": torch.tensor([[3]])}, [[4]], heads=(0, 0)
        )
