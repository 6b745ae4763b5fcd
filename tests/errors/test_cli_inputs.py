"""What commands refuse, as command lines and messages: one line says why, and no file changes."""

import io
import sys
from pathlib import Path

import pytest
from typer.main import get_command

import headwise as hw
from command import headwise
from folders import write_llama
from headwise.cli._app import app
from studies import make_study

WORDS = ("<pad>", "<s>", "</s>", "I", "work", "you", "he", "works", "they")


RULES = """
limit, builtin = 3, dict
def earlier(text): return [(i, i - 1) for i in range(1, len(text.tokens))]
def two(text, other): return []
def failing(text): return [(0, text.tokens[99])]
def yielding(text): yield text.tokens[99], 0
def leaving(text): raise SystemExit(3)
"""
SOME = "I work you work\nhe works\nthey work he works I work\nyou work they work\nhe works I\n"
EXAMPLE = '{"ids": [3, 4, 5], "query": [2, 3], "right": [[0, 1]], "wrong": [[1, 2]]}\n'


PRUNE = "prune model --by scores.csv -o taken --remove "
WITHIN = "prune model --by scores.csv -o new --within "
# These find out in the middle of their work, when some notes are printed.
BEGIN = (PRUNE, WITHIN, "roles model --text t.txt --relation")
READ_TEXTS = (
    "report model",
    "observe model",
    "roles model",
    "importance model",
    "prune model --by tab.csv --remove 0.3 -o out",
    "compare model model",
    "cache model",
    "heads model --task needle",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("inputs")
    write_llama(
        place / "model", WORDS, hidden_size=12, num_attention_heads=6, num_key_value_heads=3
    )
    (place / "some.txt").write_text(SOME, "utf-8")
    (place / "one.txt").write_text("I work\n", "utf-8")
    (place / "long.txt").write_text(" ".join(WORDS[3:8] * 6), "utf-8")
    hw.CachePlan.of({}, n_layers=2, n_kv_heads=3, sinks=1, window=5).save(place / "plan.json")
    make_study().save(place / "study")
    for number, facts in enumerate(("{", "{}", '{"settings": {"wings": 2}}')):
        (place / f"lab{number}").mkdir()
        (place / f"lab{number}" / "training.json").write_text(facts, "utf-8")
    (place / "theirs").mkdir()
    (place / "theirs" / "model.safetensors").write_bytes(b"precious")
    (place / "taken").mkdir()
    (place / "taken" / "config.json").touch()  # else --force would not replace it
    (place / "taken" / "mine").touch()
    (place / "map.svg").touch()
    (place / "page.html").touch()
    (place / "t.txt").write_text("I work you work\nhe works\n", "utf-8")
    (place / "link.html").symlink_to(place / "t.txt")
    (place / "lines.jsonl").write_text('{"text": "I work"}\n{"text": "he works"}\n', "utf-8")
    (place / "pretty.json").write_text('{\n "a": [\n  1]\n}\n', "utf-8")
    (place / "trees.conllu").write_text("# text = I\n1\tI" + "\t_" * 8 + "\n", "utf-8")
    (place / "cut.safetensors").write_bytes((5000).to_bytes(8, "little") + b'{"a": {')
    (place / "rules.py").write_text(RULES, "utf-8")
    (place / "far.jsonl").write_text(EXAMPLE + "\n" + EXAMPLE.replace("5", "99"), "utf-8")
    for ending in ("csv", "json", "parquet"):
        (place / f"image.{ending}").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    (place / "latin.csv").write_bytes("# él\n".encode("latin-1"))
    (place / "array").write_text('[\n {"text": "I work"},\n {"text": "he"}\n]\n', "utf-8")
    (place / "words.csv").write_text("word,count\nhe,2\n", "utf-8")
    done = headwise("observe", place / "model", "--text", place / "t.txt", "-o", place / "tab.csv")
    assert done.code == 0, done.err
    done = headwise(
        "importance", place / "model", "--text", place / "some.txt", "-o", place / "scores.csv"
    )
    assert done.code == 0, done.err
    return place


@pytest.mark.parametrize(("arguments", "message"), [
    ("observe model --text tab.csv -o tab.csv --force", "--out tab.csv is the input --text"),
    ("report model --text t.txt -o link.html --force", "--out link.html is the input --text t"),
    ("prune model --by tab.csv --remove 0.3 -o model --force", "model is the input MODEL"),
    ("report model --text t.txt --save model --force", "--save model is the input MODEL model"),
    ("heads model --examples plan.json --vllm-hook plan.json --force",
     "--vllm-hook plan.json is the input --examples plan.json, which would be lost."),
    ("cache model --plan - --prompt -", "cache: --plan and --prompt both read standard input. "),
    ("observe model --text tab.csv", "tab.csv is a table or a plan that headwise saved, not"),
    ("prune model --by t.txt --remove 0.3 -o out", "t.txt does not end in .parquet, .csv, .js"),
    ("prune model --by model --remove 0.3 -o out", "table file: model is a folder. Give a"),
    ("prune model --by tab.csv --remove 0.3 -o out", "not the importance of heads (Scores)"),
    ("prune model --by image.csv --remove 0.3 -o out",
     "image.csv cannot be read as csv (it is a picture). Give a file that headwise saved."),
    (
        "compare model tab.csv --text t.txt",
        "tab.csv holds results already, and model is neither a table nor a saved study. "
        "Compare two studies, or two models.",
    ),
    ("look model he --from he --to he --target he", "look: --target is for an encoder-decoder"),
    ("compare tab.csv image.json", "image.json cannot be read as json (it is a picture). Give"),
    ("prune model --by image.parquet --remove 0.3 -o out",
     "image.parquet cannot be read as parquet (it is a picture). Give a file"),
    ("prune model --by latin.csv --remove 0.3 -o out",
     "latin.csv cannot be read as csv (byte 2 is 0xe9, which is not UTF-8). Give a file"),
    ("prune model --by words.csv --remove 0.3 -o out",
     "words.csv cannot be read as csv (its first line is not what headwise writes). Give"),
    ("prune model --by model/config.json --remove 0.3 -o out",
     "model/config.json cannot be read as json (it holds no list of rows). Give a file"),
    ("report model --text - --show -", "report: --text and --show both read standard input"),
    ("observe model --text words.csv", "words.csv is a table, not plain text. Write its"),
    ("observe model --text array", "array is JSON, not plain text. Write its texts"),
    ("heads model --examples far.jsonl --paragraphs", "heads: --paragraphs is for --text. Add"),
    ("report --paragraphs -o r.html", "report: --paragraphs is for --text. Add --text FILE."),
    ("report model --text t.txt --target t.txt --paragraphs -o r.html",
     "--paragraphs with --target t.txt, which has a target for each line. Leave"),
    ("observe model --text lines.jsonl", "lines.jsonl is JSON, not plain text. Write its"),
    ("observe model --text pretty.json", "pretty.json is JSON, not plain text. Write its"),
    ("observe model --text trees.conllu", "trees.conllu is CoNLL-U, not plain text. Name it"),
    ("observe model --text cut.safetensors",
     "cut.safetensors is not UTF-8 text (it is a safetensors file)"),
    ("observe t.txt --text t.txt", "t.txt is a file, not a folder. Give the folder of a model"),
    ("observe ./modle --text t.txt", "modle is not a folder. Did you mean model? Give"),
    ("observe modle --text t.txt", "(We couldn't connect to"),
    ("observe modle --text t.txt", "). Did you mean model? Give a model's folder"),
    ("observe model --txt t.txt", "Try headwise observe --help."),
    ("observe model", "observe: no texts. Give --text FILE, or --data GLOB."),
    ("obsrve model", "Did you mean 'observe'? Try headwise --help."),
    ("observe model --text t.txt --statistics entrpy", "Did you mean entropy?"),
    ("roles model --text t.txt --nulls permutd", "Did you mean permuted?"),
    ("report ./any --text t.txt -o page.pdf", "page.pdf does not end in .html"),
    ("observe ./any --text t.txt -o t.xlsx", "t.xlsx does not end in .parquet, .csv, .json"),
    ("roles model --text t.txt --relation rules.py:limit", "has no function limit. It has"),
    ("roles model --text t.txt --relation rules.py:earler", "Did you mean earlier? It has"),
    ("roles model --text t.txt --relation rules.py:two",
     "rules.py cannot be called with one argument, the TokenText (missing a required"),
    ("roles model --text t.txt --relation rules.py:failing",
     "pairs of 'failing' fail (IndexError: tuple index out of range) for the text 'I work you w"),
    ("roles model --text t.txt --relation rules.py:yielding", "' fail (IndexError: tuple index"),
    ("roles model --text t.txt --relation rules.py:builtin", "' fail (TypeError: 'TokenText'"),
    ("roles model --text t.txt --relation rules.py:leaving", "'leaving' fail (SystemExit: 3)"),
    ("observe model --text t.txt --statistics entropy,top(frst)",
     "top of 'frst', but no mass has that name. Did you mean first?"),
    ("observe model --text t.txt --statistics entropy,punctuaton",
     "no statistic 'punctuaton'. Did you mean punctuation?"),
    ("observe model --text t.txt --statistics value(specail)",
     "value of 'specail', but no mass has that name. Did you mean special?"),
    ("observe model --text t.txt --statistics top(first),top(first)",
     "top of 'first' is requested twice. Leave one of them out."),
    ("report --study model", "load_study: model is not the folder of a study: it has no "),
    ("cache model --keep 0.5 --bytes 100", "cache: --keep and --bytes are both given. Give "),
    ("train --out t.txt", "train: t.txt cannot be written (File exists)"),
    ("observe model --text some.txt -o tab.csv", "output: tab.csv already exists. Add --force"),
    ("observe model --text some.txt --figure map.svg", "output: map.svg already exists. Add --"),
    ("importance model --text t.txt -o tab.csv", "output: tab.csv already exists. Add --force"),
    ("roles model --text t.txt -o tab.csv", "output: tab.csv already exists. Add --force to"),
    ("report model --text some.txt -o page.html", "output: page.html already exists. Add --fo"),
    ("heads model --examples far.jsonl -o plan.json", "output: plan.json already exists. Add"),
    ("heads model --examples far.jsonl",
     "find_heads: far.jsonl, line 3 has the token id 99, and the model has 9. Give ids"),
    (PRUNE + "1 --force", "plan: remove=1.0. Give a share between"),
    (PRUNE + "0 --force", "plan: remove=0.0. Give a share between"),
    ("report model --text t.txt --save t.txt", "output: --save t.txt is the input --text t"),
    ("report --text t.txt", "report: --text is for a MODEL, and none is named"),
    ("report --target t.txt", "report: --target is for a MODEL, and none is named"),
    ("report --device cpu", "report: --device is for a MODEL, and none is named"),
    ("report --no-roles", "report: --no-roles is for a MODEL, and none is named"),
    ("report --pruning", "report: --pruning is for a MODEL, and none is named"),
    ("report --examples t.txt", "report: --examples is for a MODEL, and none is named"),
    ("report ./any", "report: ./any needs texts to read. Add --text FILE."),
    ("report ./any --text t.txt --lab-folder lab", "--lab-folder lab is for the Mini-GPT, not"),
    ("report model --text t.txt --study study", "--study study is for a saved study, not for"),
    ("report --study study --text t.txt", "--text is for a MODEL, and the study in study is"),
    ("report --study study --seed 3", "--seed is for a MODEL, and the study in study is"),
    ("report --study study --save other", "--save other with --study study, which is saved"),
    ("report model --text t.txt --pruning", "report: --pruning with 2 texts or pairs; half"),
    ("observe", "Missing argument 'MODEL'. A folder, a GGUF file, or a name"),
    ("prune model -o x", "Missing option '--by'. The scores of MODEL, written by headwise impor"),
    ("observe ./any --text t.txt --max-tokens 1", "greater than or equal to 2"),
    ("compare study model", "study holds results already, and model is neither a table nor a"),
    ("compare model model", "compare: model is neither a table nor a saved study, and models"),
    ("compare tab.csv tab.csv --roles", "compare: --roles is for models, and tab.csv holds"),
    ("compare tab.csv tab.csv --max-tokens 9", "compare: --max-tokens is for models, and"),
    ("compare tab.csv tab.csv --text t.txt", "compare: --text is for models, and tab.csv"),
    ("roles model -o roles.csv", "roles: no texts. Give --text, --conllu, --coref or --spans"),
    ("roles model --conllu t.txt --json", "t.txt, line 1: 1 column."),
    ("roles model --text t.txt --nulls permuted,none", "no null 'none'"),
    ("importance model", "importance: texts come from --text or from --pairs. Give exactly"),
    ("importance model --text a --pairs b", "importance: texts come from --text or from --pai"),
    ("importance model --text a", "read_texts: a cannot be read (No such file"),
    ("importance model --pairs a", "read_pairs: a cannot be read (No such file"),
    ("heads model", "heads: neither --examples nor --task. Give one of them."),
    ("heads model --examples x --task needle", "heads: --examples and --task. Give one of"),
    ("heads model --examples x --text y", "heads: --text with --examples. Give it with --task."),
    ("heads model --examples x --save-examples y.jsonl", "heads: --save-examples with --exam"),
    ("heads model --task nedle", "'nedle' is not one of 'needle', 'passage'"),
    ("cache model --window 5,x", "Invalid value for '--window': '5,x'"),
    ("cache model --plan p.json", "cache: --plan p.json, --prompt None. To run a plan, give"),
    ("cache model --prompt t.txt", "cache: --plan None, --prompt t.txt. To run a plan, give"),
    ("cache model --plan p.json --prompt t.txt --window 9", "t.txt and --window. To run a plan"),
    ("cache model --plan p.json --prompt t.txt -o q.json", "t.txt and --out. To run a plan"),
    ("cache model --plan plan.json --prompt long.txt", "has 30 tokens, 32 are decoded, and the"),
    ("cache model --plan plan.json --prompt long.txt --max-tokens 6", "keeps all 6 tokens of the"),
    (PRUNE + "0.5", "output: taken already exists. Add --force"),
    (PRUNE + "0.5 --force --curve", "prune: --within, --curve and --recover need texts. A"),
    (PRUNE + "0.5 --force --recover 3", "--curve and --recover need texts. Add --text"),
    (PRUNE + "0.5 --force --text a --pairs b", "prune: --text and --pairs are both given."),
    (PRUNE + "0.5 --force --text one.txt --curve", "prune: --text or --pairs with 1 text"),
    (PRUNE + "0.5 --force --format stock", "Choose the format 'padded'"),
    (PRUNE + "0.5 --force --text some.txt --recover 3 --format stock", "Choose the format 'pad"),
    (PRUNE + "0.99 --force", "would empty a layer"),
    ("prune model --by none.csv --remove 0.5 -o out", "none.csv does not exist"),
    (WITHIN + "0.1", "prune: --within, --curve and --recover need texts. Add --text FILE or"),
    (PRUNE + "0.3 --force --text some.txt --within 1", "prune: both --remove and --within. Giv"),
    ("prune model --by scores.csv -o new", "prune: neither --remove nor --within. Give one of"),
    (WITHIN + "0 --text some.txt", "within=0.0 lets nothing go. Give what may be lost"),
    (WITHIN + "1 --text t.txt", "prune: --text or --pairs with 2 texts or pairs; half of"),
    (WITHIN + "1 --text some.txt --measure score", "the loss 'lm' has no score of a task"),
    (WITHIN + "1e-12 --text some.txt", "without the first 2 heads the loss lm grows by"),
    ("train --out theirs", "theirs holds model.safetensors, which would be overwritten"),
    ("report --lab-folder theirs", "theirs holds model.safetensors, which would be overwritten"),
    *((f"report --lab-folder lab{number}", f"lab{number}/training.json") for number in range(3)),
])  # fmt: skip
def test_an_input_of_the_wrong_kind_is_named(
    place: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, message: str
) -> None:
    monkeypatch.chdir(place)
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    done = headwise(*arguments.split())
    assert (done.code, done.out) == (2, "")
    *notes, line = done.err.splitlines()
    assert message in line
    assert not notes or arguments.startswith(BEGIN)
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("arguments", "content", "message"),
    [
        *((arguments, b"", "standard input holds no text") for arguments in READ_TEXTS),
        ("observe model", b"\xff\xfeI\0", "standard input is not UTF-8 text (it is text in"),
    ],
)
def test_standard_input_is_called_by_its_name(
    place: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, content: bytes, message: str
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    done = headwise(*arguments.split(), "--text", "-")
    assert done.code == 2
    assert message in done.err


def test_every_command_that_reads_texts_reads_standard_input() -> None:
    options = {
        command.name: parameter.help
        for command in get_command(app).commands.values()
        for parameter in command.params
        if "--text" in parameter.opts
    }
    assert sorted(options) == sorted(arguments.split()[0] for arguments in READ_TEXTS)
    assert [name for name, text in options.items() if "or - for standard input" not in text] == []


def test_texts_that_cache_makes_up_fit_the_model(place: Path) -> None:
    done = headwise("cache", place / "model", "--window", "8", "--max-texts", "2", "--json")
    assert done.code == 0, done.err  # its context of 40 tokens is shorter than 1,024


def test_names_are_printed_in_any_terminal_and_as_they_are(place: Path) -> None:
    done = headwise("report", "./Größe", encoding="ascii")
    assert done.err == "report: ./Gr\\xf6\\xdfe needs texts to read. Add --text FILE.\n"
    done = headwise("report", "./\x1b[31m[bold]\nred\u202e", "--text", place / "t.txt",
                    "--out", place / "named.html")  # fmt: skip
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "[bold]" in done.err
    assert not {"\x1b", "\u202e"} & {*done.err}
