"""Real models whose heads are known from elsewhere: which of them are found, and what is not there.

    OMP_NUM_THREADS=1 python -m benchmarks.real_models.study rxnmapper \\
        --into benchmarks/results/real-models.md
    OMP_NUM_THREADS=1 python -m benchmarks.real_models.study smollm2 --paragraphs GAP.tsv \\
        --text PLAY.txt --into benchmarks/results/real-models-smollm2.md
    OMP_NUM_THREADS=1 python -m benchmarks.real_models.study gemma --paragraphs GAP.tsv \\
        --text PLAY.txt --into benchmarks/results/real-models-gemma.md

What would count as found is written down in the file of each model, before it was measured. Models
are fetched from packages of others, see `_packages.py`; steps that were computed are not repeated.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks._report import parser_of, show, software
from benchmarks.real_models._effects import smollm2_effects, smollm2_whole_way
from benchmarks.real_models._gemma import gemma
from benchmarks.real_models._rxnmapper import rxnmapper
from benchmarks.real_models._smollm2 import smollm2
from benchmarks.real_models._whisper import whisper

# Measures a model, and returns its part of the page.
MODELS: dict[str, Callable[..., str]] = {
    "gemma": gemma,
    "rxnmapper": rxnmapper,
    "smollm2": smollm2,
    "smollm2-effects": smollm2_effects,
    "smollm2-whole-way": smollm2_whole_way,
    "whisper": whisper,
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("name", choices=MODELS)
    parser.add_argument(
        "--paragraphs", type=Path, help="a GAP table, which both language models read"
    )
    parser.add_argument("--text", type=Path, help="a long text, which both read")
    parser.add_argument("--only", nargs="+", help="the steps of either to measure")
    options = parser.parse_args()
    torch.set_num_threads(1)
    reads = options.name in ("gemma", "smollm2")
    read = [options.paragraphs, options.text, options.only] if reads else []
    show(f"{software()}.\n\n{MODELS[options.name](*read)}", options.into, options.name)


if __name__ == "__main__":
    main()
