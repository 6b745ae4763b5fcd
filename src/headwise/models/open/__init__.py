"""Open a model by folder or hub name, after its files are checked."""

from headwise.models.open._load import load, load_tokenizer

__all__ = ["load", "load_tokenizer"]
