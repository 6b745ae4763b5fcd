"""The commands, from the training of a tiny Mini-GPT to its page."""

import dataclasses
import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pandas as pd
import pytest
import typer

from command import headwise
from headwise.cli._app import EXAMPLES, app
from headwise.cli._train import train
from headwise.lab import MiniGPTConfig, TrainSettings
from headwise.tables import Head, HeadTable

TINY = ("--steps", 3, "--d-model", 8, "--layers", 2, "--heads", 2)
TEXT = "I work , you work\nhe works\nthey work\n"
COMMANDS = {command.callback.__name__: command for command in app.registered_commands}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mini-GPT that has been trained for three steps."""
    folder = tmp_path_factory.mktemp("lab") / "tiny"
    done = headwise("train", "--out", folder, *TINY)
    assert done.code == 0
    # Nothing, or a line after half a minute.
    label = f"Training a Mini-GPT in {folder}: "
    assert all(line.startswith(label) for line in done.err.splitlines())
    assert "held-out conjugation" in done.out
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "some.txt"
    path.write_text(TEXT, "utf-8")
    return path


def test_a_trained_folder_is_not_trained_again(folder: Path) -> None:
    before = (folder / "model.safetensors").read_bytes()
    done = headwise("train", "--out", folder, "--json")
    assert done.err == f"The Mini-GPT in {folder} is already trained\n"
    summary = json.loads(done.out)
    assert (summary["folder"], summary["steps"], summary["sample"]) == (str(folder), 3, None)
    assert 0 <= summary["held-out translation"] <= 1
    assert (folder / "model.safetensors").read_bytes() == before


def test_a_prompt_is_continued(folder: Path) -> None:
    done = headwise("train", "--out", folder, "--prompt", "I work , you work , he")
    assert done.out.startswith("I work , you work , he ")
    assert done.out.count("\n") == 1


@pytest.mark.full
def test_words_that_the_model_does_not_know_are_named(folder: Path, tmp_path: Path) -> None:
    done = headwise("look", folder, "I zebra , he", "-o", tmp_path / "look.html")
    assert done.code == 0
    said = re.search(r"does not know 'zebra'. It knows (\d+) words, such as (.*)", done.err)
    assert said is not None
    assert 10 <= len(said[2].split()) <= min(20, int(said[1]))


@pytest.mark.full  # its roles are tested against nulls, and its example sentences are drawn
def test_the_report_of_the_mini_gpt(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    done = headwise("report", "--lab-folder", folder, "--out", page)
    assert done.code == 0
    *lines, last = done.out.splitlines()
    assert last == f"The page is {page}"
    assert 1 <= len(lines) <= 3
    assert "Mini-GPT" in page.read_text("utf-8")


def test_json_has_the_rows_of_the_frame(folder: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "table.parquet"
    done = headwise("observe", folder, "--text", text, "--json", "-o", out)
    rows = json.loads(done.out)
    frame = HeadTable.load(out).frame()
    pd.testing.assert_frame_equal(pd.DataFrame(rows).astype(frame.dtypes), frame)
    assert rows[0]["next"] is None  # nothing in a decoder attends to the next token


def test_a_figure_has_a_map_of_each_statistic(folder: Path, text: Path, tmp_path: Path) -> None:
    figure = tmp_path / "maps.svg"
    figure.write_text("mine", "utf-8")  # which is replaced
    names = "entropy,max_weight,first,previous"
    done = headwise(
        "observe", folder, "--text", text, "--statistics", names, "--figure", figure, "--force"
    )
    assert done.code == 0, done.err
    drawn = figure.read_text("utf-8")
    assert all(f">{name} (" in drawn for name in names.split(","))


def test_without_an_output_the_rows_are_printed(folder: Path, text: Path) -> None:
    rows = json.loads(headwise("observe", folder, "--text", text, "--json").out)
    done = headwise("observe", folder, "--text", text)
    header, *lines = done.out.splitlines()
    assert [line.split()[0] for line in lines] == [row["name"] for row in rows]
    column = header.split().index("entropy")
    assert [line.split()[1 + column] for line in lines] == [f"{row['entropy']:.3g}" for row in rows]
    assert "sink" not in header  # a statistic that this model does not have


def test_every_statistic_of_a_table_can_be_requested(
    folder: Path, text: Path, tmp_path: Path
) -> None:
    arguments = ("observe", folder, "--text", text, "--json")
    everything = json.loads(headwise(*arguments).out)
    names = [name for name in everything[0] if name not in ("name", "stack", "layer", "head")]
    assert "punctuation" in names
    requested = json.loads(headwise(*arguments, "--statistics", ",".join(names)).out)
    assert requested == everything
    assert json.loads(headwise(*arguments, "--per-text").out) == everything
    top = json.loads(headwise(*arguments, "--statistics", "top(punctuation)").out)
    assert top[0]["punctuation"] == everything[0]["punctuation"]
    assert 0 <= top[0]["top(punctuation)"] <= 1


def test_long_work_shows_a_progress_bar(
    folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SECONDS_BEFORE_BAR", "SECONDS_BETWEEN_LINES"):
        monkeypatch.setattr(f"headwise._progress.{name}", 0.0)
    done = headwise("observe", folder, "--text", text, "--json")
    assert json.loads(done.out)
    assert "100%" in done.err


def test_split_texts_are_reported(folder: Path, text: Path) -> None:
    done = headwise("observe", folder, "--text", text, "--max-tokens", 2, "--json")
    assert done.code == 0
    match = re.search(
        r"^Long texts are split: 3 texts into (\d+) pieces of at most 2 tokens$", done.err, re.M
    )
    assert match
    assert int(match[1]) > 3
    whole = headwise("observe", folder, "--text", text, "--json")
    assert "Long texts are split" not in whole.err


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_help_lists_the_commands(arguments: tuple[str, ...]) -> None:
    done = headwise(*arguments)
    assert done.code == 0
    assert all(f"\n  {name} " in done.out for name in ("report", "train", "observe", "explain"))
    assert "...\n" not in done.out.partition("Commands:")[2]  # one line for each


@pytest.mark.parametrize("command", ["report", "train", "observe", "explain"])
def test_every_option_is_explained(command: str) -> None:
    done = headwise(command, "--help")
    assert done.code == 0
    for line in done.out.splitlines():
        assert not line.startswith("  -") or "  " in line.strip() or "|" in line, line


def test_help_shows_the_true_defaults() -> None:
    settings = vars(TrainSettings())
    hints = get_type_hints(train, include_extras=True)
    shown = {name: get_args(hints[name])[1].show_default for name in settings if name in hints}
    assert shown.pop("n_kv_heads") == "heads"
    assert shown == {name: str(settings[name]) for name in shown}
    sizes = {field.name for field in dataclasses.fields(MiniGPTConfig)}
    assert shown.keys() >= sizes - {"vocab_size", "n_kv_heads", "dropout"}


def test_the_version_names_torch_and_the_native_kernel() -> None:
    versions, native = headwise("--version").out.splitlines()
    assert re.fullmatch(r"headwise \d\S+ \(torch 2\.\S+\)", versions)
    assert re.fullmatch(r"native kernel: (none|amx|avx512bf16|avx512|avx2|neon) \(.+\)", native)


def test_the_version_is_printed_without_delay() -> None:
    program = (
        "import sys; from headwise.cli import main\n"
        "try: main(['--version'])\n"
        "finally: assert not {'torch', 'transformers', 'pandas'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("headwise 0.")


def test_the_package_can_be_run() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headwise", "explain", "--json"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["heads"][0] == [0.62, 0.19, 0.085, 0.21]


def test_an_interruption_has_its_own_exit_code(monkeypatch: pytest.MonkeyPatch, text: Path) -> None:
    def interrupt(path: Path, **options: bool) -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr("headwise.cli._inputs.read_texts", interrupt)
    done = headwise("observe", "any", "--text", text, "--json")
    assert (done.code, done.out, done.err) == (130, "", "Interrupted.\n")


def test_an_interrupted_training_says_how_to_resume(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headwise.lab.train", interrupt)
    done = headwise("train", "--out", tmp_path / "lab")
    assert done.code == 130
    assert done.err.splitlines()[-2:] == [
        f"Run the same command again to resume from the last checkpoint in {tmp_path / 'lab'}.",
        "Interrupted.",
    ]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_an_example_that_the_command_can_read(name: str) -> None:
    done = headwise(name, "--help")
    assert " ".join(done.out.split()).endswith(f"Example: {EXAMPLES[name]}")
    program, command, *arguments = shlex.split(EXAMPLES[name])
    assert (program, command) == ("headwise", name)
    group = typer.main.get_command(app)
    with group.make_context("headwise", [command], resilient_parsing=True) as context:
        parsed = group.commands[name].make_context(name, arguments, parent=context)
    assert parsed.params.get("out", True)


def test_texts_come_from_standard_input(
    folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = []
    for source in (text, "-"):
        stdin = io.TextIOWrapper(io.BytesIO(TEXT.encode()), "utf-8")
        monkeypatch.setattr(sys, "stdin", stdin)
        done = headwise("observe", folder, "--text", source, "--json")
        assert done.code == 0, done.err
        outputs.append(done.out)
    assert outputs[0] == outputs[1]


# The importance of heads, from the weights of a model to its table of scores.


def test_pairs_are_read_as_sentences(folder: Path, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.csv"
    pairs.write_text('"I work , you work",he works,3.5\nthey work,he works,1\n', "utf-8")
    done = headwise("importance", folder, "--pairs", pairs, "--json", "--rounds", 2)
    rows = json.loads(done.out)
    assert [row["name"] for row in rows] == [
        str(Head("", layer, head)) for layer in range(2) for head in range(2)
    ]
    assert sorted(row["round"] for row in rows) == [0, 0, 1, 1]
    assert all(row["ci_low"] <= row["importance"] <= row["ci_high"] for row in rows)
    text = tmp_path / "same.txt"
    text.write_text("I work , you work\nhe works\nthey work\n", "utf-8")
    same = headwise("importance", folder, "--text", text, "--json", "--rounds", 2)
    assert json.loads(same.out) == rows
    capped = headwise("importance", folder, "--text", text, "--json", "--max-texts", 1)
    assert all(row["ci_low"] is None for row in json.loads(capped.out))
