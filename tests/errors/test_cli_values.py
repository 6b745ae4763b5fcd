"""Values that no command can use: one clear line that names option and value, no traceback."""

import re
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest
from typer.main import get_command

from command import headwise
from folders import write_llama
from headwise.cli._app import app

COMMANDS = get_command(app).commands
WORDS = ("<pad>", "<bos>", "<eos>", "one", "two", "three")

# A correct command line of every command; all its files exist.
RIGHT: dict[str, tuple[str, ...]] = {
    "report": ("model", "--text", "good.txt", "--out", "page.html"),
    "observe": ("model", "--text", "good.txt", "--out", "table.csv"),
    "roles": ("model", "--text", "good.txt", "--out", "roles.csv"),
    "importance": ("model", "--text", "good.txt", "--out", "scores.csv"),
    "prune": ("model", "--by", "by.csv", "--remove", "0.3", "--out", "small"),
    "train": ("--out", "lab"),
    "explain": (),
}
FILES = {
    "report": ("--text", "--out", "--lab-folder"),
    "observe": ("--text", "--out"),
    "roles": ("--text", "--out", "--conllu", "--coref", "--spans"),
    "importance": ("--text", "--pairs", "--out"),
    "prune": ("--by", "--out", "--text", "--pairs"),
    "train": ("--out",),
}
SHARED = ("report", "observe", "roles", "importance", "prune")
NUMBERS = {
    "prune": ("--remove", "--within", "--rate", "--recover"),
    "importance": ("--rounds",),
    "train": (
        "--steps", "--layers", "--heads", "--kv-heads", "--d-model", "--mlp-ratio", "--context",
        "--seed",
    ),
    **dict.fromkeys(SHARED, ()),
}  # fmt: skip
NUMBERS |= {name: (*NUMBERS[name], "--seed", "--max-texts", "--max-tokens") for name in SHARED} | {
    "prune": (*NUMBERS["prune"], "--seed", "--max-texts", "--max-tokens", "--remove", "--rate")
}
NO_MODELS = ("-", "~", "~someone", "two words", "no\\model", "a/b/c", "--", "*")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "model"
    write_llama(folder, WORDS, hidden_size=12, num_attention_heads=3)
    return folder


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path) -> Path:
    """A folder to work in, which the command must leave as it was."""
    (tmp_path / "good.txt").write_text("one two three\ntwo one\n", "utf-8")
    (tmp_path / "by.csv").write_text("head\n", "utf-8")
    (tmp_path / "model").symlink_to(model)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pairs(commands: Collection[str], values: Sequence[str]) -> list[tuple[str, str]]:
    """The first command with every value, the others with one: all share the same checks."""
    return [
        (command, value)
        for number, command in enumerate(commands)
        for value in (values if number == 0 else [values[number % len(values)]])
    ]


def refused(place: Path, *arguments: str) -> str:
    """The one line of a command that fails and leaves everything as it was."""
    before = sorted(place.rglob("*"))
    done = headwise(*arguments)
    assert (done.code, done.out) == (2, ""), arguments
    assert re.fullmatch(r"\S[^\n]*\.\n", done.err), (arguments, done.err)
    assert "Traceback" not in done.err
    assert sorted(place.rglob("*")) == before, arguments
    return done.err


def replaced(command: str, option: str, value: str) -> tuple[str, ...]:
    """The correct command line with another value for one option."""
    right = [*RIGHT[command]]
    if option in right:
        right[right.index(option) + 1] = value
        return (command, *right)
    return (command, *right, option, value)


@pytest.mark.parametrize(("command", "value"), pairs(RIGHT, ["", " ", "a\0b", "caf\udce9"]))
def test_an_unusable_value_is_reported_with_its_option(
    place: Path, command: str, value: str
) -> None:
    why = {"": "is empty", " ": "is empty", "a\0b": "NUL", "caf\udce9": "not valid UTF-8"}[value]
    for option in (*FILES.get(command, ()), *(["--device"] if command in SHARED else [])):
        line = refused(place, *replaced(command, option, value))
        assert option in line
        assert why in line
    if "model" in RIGHT[command]:
        line = refused(place, command, value, *RIGHT[command][1:])
        assert "MODEL" in line
        assert why in line


@pytest.mark.parametrize(("command", "value"), pairs(SHARED, NO_MODELS))
def test_an_argument_that_is_no_model(place: Path, command: str, value: str) -> None:
    if command == "prune":
        (place / "by.csv").unlink()  # scores are read before a model
    line = refused(place, command, "--", value) if value == "--" else refused(
        place, command, value, *RIGHT[command][1:]
    )  # fmt: skip
    assert value in line or command == "prune"


@pytest.mark.parametrize(
    ("command", "value"), pairs(NUMBERS, ["nan", "inf", "-inf", "-1", "x", "1e400"])
)
def test_an_argument_that_is_no_number(place: Path, command: str, value: str) -> None:
    for option in NUMBERS[command]:
        right = replaced(command, option, value)
        if option == "--rate":
            right = (*right, "--recover", "1", "--text", "good.txt")
        line = refused(place, *right)
        assert option in line, line
        assert value in line or (value == "1e400" and "inf" in line), line


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("cache model --text good.txt --keep 7", "keep=7.0. Give a share"),
        ("cache model --text good.txt --sinks 4 --window 999", "window=999 keep all"),
        ("train --kv-heads 3 --out lab", "n_heads=4 is not a multiple of n_kv_heads=3. "),
        ("train --context 5 --out lab", "context is 5. Give 33 or more."),
        ("train --d-model 100000 --out lab", "mlp_ratio=2, context=40 give 240,004,000,000 weig"),
        ("train --heads 3 --out lab", "d_model=128 is not a multiple of n_heads=3. "),
        ("train --steps 0 --out lab", "steps is 0. "),
        ("look model words --target x", "target='x' alone is for an encoder-decoder"),
        ("look model good.txt", "good.txt is a file, and TEXT is the sentence itself. "),
    ],
)
def test_errors_of_the_library_stay_as_they_are(place: Path, line: str, message: str) -> None:
    assert message in refused(place, *line.split())


@pytest.mark.parametrize(
    ("command", "value"), pairs([*SHARED, "train"], ["99999999999999999999999", "4294967296"])
)
def test_seeds_are_not_too_large(place: Path, command: str, value: str) -> None:
    line = refused(place, *replaced(command, "--seed", value))
    assert "--seed" in line
    assert value in line


@pytest.mark.parametrize(
    ("command", "value"),
    pairs(SHARED[:4], ["meta", "cuda:7", "nonsense", "mkldnn", "hpu", "cpu:-1"]),
)
def test_unavailable_devices(place: Path, command: str, value: str) -> None:
    line = refused(place, *replaced(command, "--device", value))
    assert f"--device: '{value}' cannot be used here" in line


@pytest.mark.parametrize("prompt", ["caf\udce9", "a\0b"])
def test_prompts_that_are_not_valid_text(place: Path, prompt: str) -> None:
    assert "--prompt" in refused(place, "train", "--out", "lab", "--prompt", prompt)


def test_a_prompt_is_checked_before_training(place: Path) -> None:
    line = refused(place, "train", "--out", "lab", "--prompt", "I frobnicate")
    assert "does not know the word 'frobnicate'" in line
    line = refused(place, "train", "--out", "lab", "--prompt", "I " * 40)
    assert "the prompt has 41 tokens but the context holds 40" in line
    assert not (place / "lab").exists()


@pytest.mark.parametrize("command", [("roles",), ("roles", "--nulls", "none")])
def test_half_of_a_surrogate_pair_in_a_file(place: Path, command: tuple[str, ...]) -> None:
    (place / "spans.jsonl").write_text('{"text": "one \\ud800 two"}\n', "ascii")
    line = refused(place, *command, "model", "--spans", "spans.jsonl")
    assert "spans.jsonl, line 1" in line
    assert "surrogate" in line
