"""Benchmarks of several commands, which keep their results in a folder."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch


def keep(options: argparse.Namespace, name: str, content: object) -> None:
    """Write a result into the folder for results."""
    (options.keep / f"{name}.json").write_text(json.dumps(content), "utf-8")


def run_command(
    parser: argparse.ArgumentParser,
    commands: Sequence[argparse.ArgumentParser],
    arguments: Sequence[str] | None = None,
) -> None:
    """Run the command that is named, on one thread; each has a function `run` of its options."""
    for command in commands:
        command.add_argument("--keep", type=Path, required=True, help="a folder for the results")
    options = parser.parse_args(arguments)
    options.keep.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    options.run(options)
