"""Small valid files of every text format, and scores to save."""

import json
from dataclasses import asdict

import numpy as np

from headwise.cli._train import settings_in
from headwise.corpora import (
    read_conllu,
    read_gap,
    read_jsonl,
    read_pairs,
    read_parallel,
    read_texts,
)
from headwise.lab import TrainSettings
from headwise.tables import Head, Scores

HEADS = (Head("", 0, 0), Head("", 0, 1), Head("", 1, 0))
SCORES = Scores(
    HEADS,
    np.array([0, 1, 0]),
    np.arange(6.0).reshape(2, 3),
    rounds=np.array([0, 0, 1]),
    model="abc",
    versions={"torch": "2"},
)
COLUMNS = "ID\tText\tPronoun\tPronoun-offset\tA\tA-offset\tA-coref\tB\tB-offset\tB-coref\tURL\n"
MENTIONS = "t-1\tAnn said Bea ran, she did\tshe\t18\tAnn\t0\tTRUE\tBea\t9\tFALSE\tu\n"
TREE = (
    "# text = don't go\n1-2\tdon't\t_\t_\t_\t_\t_\t_\t_\t_\n1\tdo\tdo\tAUX\t_\t_\t3\taux\t_\t_\n"
    "2\tn't\tnot\tPART\t_\t_\t3\tadvmod\t_\t_\n3\tgo\tgo\tVERB\t_\t_\t0\troot\t_\t_\n\n"
)
LINE = (
    '{"text": "Ann sang", "words": [[0, 3], [4, 8]], "tags": ["PROPN", "VERB"], '
    '"arcs": [[0, 1, "nsubj"]], "mentions": [[0, 3, 0]]}\n'
)
TEXTS = {
    "conllu": (TREE * 2, read_conllu),
    "gap": (COLUMNS + MENTIONS, read_gap),
    "jsonl": (LINE * 2, read_jsonl),
    "parallel": ("one line\nanother\n", lambda path: read_parallel(path, path)),
    "pairs": ('a man runs,"a man, running",4.5\nx,y,0\n', read_pairs),
    "texts": ("one line\nanother\n\nsecond paragraph é\n", read_texts),
    "training": (
        json.dumps({"settings": asdict(TrainSettings()), "facts": {}}),
        lambda path: settings_in(path.parent),
    ),
}  # fmt: skip
NAMES = {"training": "training.json"}
