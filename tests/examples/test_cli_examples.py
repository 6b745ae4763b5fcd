"""The examples that the commands' help shows, run to the letter in a folder with their files."""

import json
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers

from command import headwise
from corpus_files import WORDS, random_texts, write_parquet
from folders import write_llama
from headwise.cli._app import EXAMPLES

KNOWN = (*WORDS, "The", "animal", "was", "tired", ".")
SIZES = {"hidden_size": 32, "num_attention_heads": 8, "max_position_embeddings": 320}
TINY = shlex.split("--steps 3 --d-model 8 --layers 2 --heads 2")
# What an example reads that another one has written.
AFTER = {"prune": "importance"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models and files that the examples name."""
    place = tmp_path_factory.mktemp("examples")
    for name in ("gpt2", "Qwen/Qwen3-0.6B", "fine-tuned"):
        write_llama(place / name, KNOWN, **SIZES)
    torch.manual_seed(4)
    config = transformers.LlamaConfig.from_pretrained(place / "fine-tuned")
    transformers.LlamaForCausalLM(config).save_pretrained(place / "fine-tuned")
    texts = random_texts(40)
    (place / "texts.txt").write_text("\n".join(texts), "utf-8")
    annotated = [
        {"text": text, "words": [[0, 2], [3, 5]], "pairs": [[1, 0, "x"]]} for text in texts
    ]
    (place / "annotated.jsonl").write_text("\n".join(map(json.dumps, annotated)), "utf-8")
    answers = [{"text": text, "right": " The", "other": " animal"} for text in texts]
    (place / "answers.jsonl").write_text("\n".join(map(json.dumps, answers)), "utf-8")
    (place / "data").mkdir()
    write_parquet(place / "data" / "part.parquet", texts)
    done = headwise("train", "--out", place / "mini-gpt", *TINY)  # a finished run is not repeated
    assert done.code == 0, done.err
    return place


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in AFTER])
def test_an_example_runs(place: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr("webbrowser.open", lambda *_: False)
    for example in (name, *(later for later, first in AFTER.items() if first == name)):
        arguments = shlex.split(EXAMPLES[example])[1:]
        done = headwise(*arguments)
        assert done.code == 0, done.err
        for option, out in pairwise(arguments):
            assert option != "--out" or Path(out).exists()
