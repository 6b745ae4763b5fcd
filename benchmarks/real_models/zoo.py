"""Try every step on a tiny random model of each architecture, and write the table of results.

`make zoo` runs it:

    PYTHONPATH=tests/models python -m benchmarks.real_models.zoo --into benchmarks/results/models.md
"""

import platform
import sys
import warnings
from importlib.metadata import version

import torch
from architectures import GROUPS
from architectures.trial import STEPS
from transformers.utils import logging

from benchmarks._report import parser_of, show
from benchmarks.real_models._trials import Trials


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="*", help="the architectures to try")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    trials = Trials(STEPS, "reasons")
    parts = [
        f"## {title}\n\n{trials.table('architecture', cases.items(), options.only)}"
        for title, cases in GROUPS.items()
    ]
    packages = ", ".join(f"{name} {version(name)}" for name in ("transformers", "torch"))
    told = f"{packages}, Python {platform.python_version()}."
    text = "\n\n".join([told, *parts, f"## Reasons\n\n{trials.notes()}"])
    show(text, options.into)
    sys.exit("\n".join(trials.broken))


if __name__ == "__main__":
    main()
