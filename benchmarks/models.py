"""Try every step on a tiny random model of each architecture, and write the table of the docs.

`make zoo` runs it: PYTHONPATH=tests/models python benchmarks/models.py --into docs/models.md
"""

import argparse
import platform
import sys
import warnings
from importlib.metadata import version

import torch
from _report import insert, table
from architectures import GROUPS
from architectures.trial import STEPS, Trial, try_out
from transformers.utils import logging

# A part of the message of a refusal, and the reason as the table gives it.
REASONS = {
    "no attention call was captured": "no softmax attention that can be followed",
    "no attention was captured": "no softmax attention that can be followed",
    "no output projection that is a plain": "heads are not mixed by a plain linear layer",
    "changes its heads before": "heads are changed before they are mixed",
    "attends several times in one pass": "a layer attends several times in one pass",
    "depend on one another": "a norm over all heads, or values that heads share",
    "is shared by several layers": "layers share weights, and would keep different heads",
    "does not run": "its code outside the attention assumes the number of heads",
    "something outside the attention depends": "biases outside the attention belong to heads",
    "runs without gradients": "it switches gradients off inside",
    "answers at random": "it answers at random",
    "in its configuration, so that its heads cannot share": "no number of kv heads in its "
    "configuration",
    "not separate rows of one linear layer": "keys are not rows of a linear layer",
    "cannot be observed, since its attention": "queries are not known: attention by hand",
    "cannot be shared": "weights for each kv head outside the projections",
    "where the model has 1": "it has one kv head",
    "ignores the configuration": "it ignores the configuration",
    "a fresh process says": "the loaded model answers differently",
    "leaves no place for further keys": "queries, keys and values are interleaved",
    "is no class of transformers": "its class is not one of Transformers",
    "does not compute attention from": "heads are mixed before or after the softmax",
    "attends with tensors of shape": "parts of an image stand in an axis of their own",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", help="the page to write the tables into")
    parser.add_argument("--only", nargs="*", help="the architectures to try")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    reasons: dict[str, int] = {}
    parts, broken = [], []
    for title, cases in GROUPS.items():
        rows = []
        for name, case in cases.items():
            if options.only and name not in options.only:
                continue
            trial = try_out(case)
            broken += [f"{name}, {step}: {error}" for step, error in trial.broken.items()]
            rows.append([name, *(cell(trial, step, reasons) for step in STEPS)])
            print(*rows[-1], sep="; ", file=sys.stderr, flush=True)
        parts.append(f"## {title}\n\n{table(['architecture', *STEPS], rows)}")
    notes = "\n".join(f"{number}. {reason}" for reason, number in reasons.items())
    packages = ", ".join(f"{name} {version(name)}" for name in ("transformers", "torch"))
    text = "\n\n".join(
        [f"{packages}, Python {platform.python_version()}.", *parts, f"## Reasons\n\n{notes}"]
    )
    print(text)
    if options.into:
        insert(text, options.into)
    sys.exit("\n".join(broken))


def cell(trial: Trial, step: str, reasons: dict[str, int], anchor: str = "reasons") -> str:
    """A tick, the number of the reason, or nothing if the step was not reached."""
    if step in trial.broken:
        return "error"
    if step not in trial.results:
        return ""
    message = trial.results[step]
    if not message:
        return "✓"
    known = (reason for part, reason in REASONS.items() if part in message)
    reason = next(known, message.partition(": ")[2].partition(". ")[0])
    return f"[{reasons.setdefault(reason, len(reasons) + 1)}](#{anchor})"


if __name__ == "__main__":
    main()
