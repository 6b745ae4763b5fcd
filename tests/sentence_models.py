"""A folder of sentence-transformers with a tiny model: pooling, a dense layer, normalisation."""

from pathlib import Path

import torch
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling
from sentence_transformers.sentence_transformer.modules import Transformer as First

from folders import word_tokenizer

WORDS = ("[PAD]", "[UNK]", "A", "man", "plays", "a", "guitar", "The", "cat", "sleeps", "on", "roof")
TEXTS = ["A man plays a guitar on a roof", "The cat sleeps", "a man sleeps on The cat", "The roof"]


def write_sentence_model(folder: Path, *, kv_heads: int | None = None) -> None:
    """Write a BERT of 2 layers of 4 heads, or with kv heads a Llama, that reads 6 tokens."""
    inner = folder.parent / f"{folder.name}-inner"
    names = {"pad_token": WORDS[0], "unk_token": WORDS[1]}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=word_tokenizer(WORDS, WORDS[1]), **names
    )
    tokenizer.save_pretrained(inner)
    sizes = {
        "vocab_size": len(WORDS), "hidden_size": 16, "intermediate_size": 20,
        "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 40,
    }  # fmt: skip
    torch.manual_seed(3)
    model: transformers.PreTrainedModel
    if kv_heads is None:
        model = transformers.BertModel(transformers.BertConfig(**sizes))
    else:
        config = transformers.LlamaConfig(**sizes, num_key_value_heads=kv_heads, pad_token_id=0)
        model = transformers.LlamaModel(config)
    with torch.no_grad():  # so that heads matter
        for name, weight in model.named_parameters():
            if "att" in name and weight.ndim == 2:
                weight.mul_(12)
    model.save_pretrained(inner)
    first = First(str(inner), max_seq_length=6)
    modules = [Pooling(16, "mean"), Dense(16, 12), Normalize()]
    prompts = {"query": "man ", "document": ""}
    whole = SentenceTransformer(modules=[first, *modules], device="cpu", prompts=prompts)
    whole.save(str(folder), create_model_card=False)


def open_with_head(folder: Path, kind: str) -> CrossEncoder | SparseEncoder:
    """A model around the tiny BERT with a head, which is written to the folder."""
    inner = folder.parent / f"{folder.name}-inner"
    is_cross = kind == "CrossEncoder"
    heads = transformers.AutoModelForSequenceClassification, transformers.AutoModelForMaskedLM
    torch.manual_seed(5)
    auto, options = heads[not is_cross], {"num_labels": 1} if is_cross else {}
    target = folder.parent / kind
    auto.from_pretrained(inner, **options).save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(inner).save_pretrained(target)
    return (CrossEncoder if is_cross else SparseEncoder)(str(target), device="cpu")


def open_sentence_model(folder: Path) -> SentenceTransformer:
    return SentenceTransformer(str(folder), device="cpu")
