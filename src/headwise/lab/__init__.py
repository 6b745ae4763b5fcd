"""The Mini-GPT lab: a small model, its training on a generated grammar, and its evaluation."""

from headwise.lab._checkpoint import load, read_model, read_tokenizer, save
from headwise.lab._data import make_tokenizer
from headwise.lab._evaluate import Evaluation, EvaluationScores, evaluate
from headwise.lab._model import MiniGPT, MiniGPTConfig
from headwise.lab._run import TrainSettings
from headwise.lab._sample import encode_prompt, sample
from headwise.lab._train import Trained, train

__all__ = [
    "Evaluation",
    "EvaluationScores",
    "MiniGPT",
    "MiniGPTConfig",
    "TrainSettings",
    "Trained",
    "encode_prompt",
    "evaluate",
    "load",
    "make_tokenizer",
    "read_model",
    "read_tokenizer",
    "sample",
    "save",
    "train",
]
