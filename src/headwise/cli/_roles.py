"""`headwise roles`: what each head does, with its evidence, as a table."""

from collections.abc import Hashable, Sequence
from contextlib import suppress
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

from headwise._display import counted, did_you_mean
from headwise.cli import _options
from headwise.cli._options import opt
from headwise.cli._print import print_json, print_note, print_table, progress_bar
from headwise.errors import ArgumentError, InputError

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from headwise.corpora import AnnotatedText
    from headwise.roles import Evidence, Relation, Relations, Roles

# The outcome is last: with its reason it is a sentence.
_OUTCOME = [
    *("role", "heads", "nearest", "effect", "ci_low", "ci_high", "baseline", "smallest", "p_adj"),
    "outcome",
]


def roles(
    model: _options.Model,
    text: _options.TextFile = None,
    conllu: Annotated[Path | None, opt("CoNLL-U, with dependency trees.")] = None,
    coref: Annotated[Path | None, opt("Coreference: a GAP table.")] = None,
    spans: Annotated[Path | None, opt("JSON lines with annotated spans and pairs of them.")] = None,
    relation: Annotated[
        list[str] | None,
        opt(
            "Your own relation: a function in a Python file, which is executed. It maps a "
            "TokenText to pairs of tokens (query, key); a ChoiceRelation in its place chooses "
            "among candidates, and a Role has its own score and kind. Repeatable.",
            "--relation",
            metavar="FILE.py:NAME",
        ),
    ] = None,
    heads: _options.Heads = None,
    names: Annotated[
        list[str] | None,
        opt(
            "A role that was named before these inputs were seen: p is adjusted for such roles "
            "alone. Repeatable.",
            "--role",
            metavar="ROLE",
            shown="all",
        ),
    ] = None,
    nulls: _options.Nulls = None,
    out: _options.Out = None,
    force: _options.Force = False,
    as_json: _options.Json = False,
    figure: _options.Figure = None,
    device: _options.Device = None,
    dtype: _options.Dtype = None,
    attention: _options.Attention = None,
    seed: _options.Seed = None,
    max_texts: _options.MaxTexts = None,
    max_tokens: _options.MaxTokens = None,
    paragraphs: _options.Paragraphs = None,
) -> None:
    """Find what each head looks at, tested against baselines.

    Roles are evaluated on held-out texts. Prints the roles of heads, then the outcome for each
    role, those of relations and annotations first: found, not found (with the nearest head and the
    smallest effect that these texts could have shown), or not tested. With -o, writes the table of
    heads instead, and prints the outcomes only. With --json, prints the rows of heads with a role
    as JSON, and for every other role the row of the head that comes nearest, with its outcome.
    """
    if not _options.given_options(text=text, conllu=conllu, coref=coref, spans=spans):
        raise ArgumentError(
            "roles: no texts. Give --text, --conllu, --coref or --spans, or several of them."
        )
    _options.check_output(out, *_options.TABLES, force=force)
    _options.check_figure(figure, force)
    from headwise import corpora
    from headwise.cli._inputs import draw_texts, open_model, read_text_file
    from headwise.roles import Evidence

    texts: list[str | AnnotatedText] = [
        *([] if text is None else read_text_file(text, paragraphs)),
        *([] if conllu is None else corpora.read_conllu(conllu)),
        *([] if coref is None else corpora.read_gap(coref)),
        *([] if spans is None else corpora.read_jsonl(spans)),
    ]
    evidence = Evidence(_options.names_of_nulls(nulls), seed=seed or 0)
    relations = _load_relations(relation or (), model)
    drawn = draw_texts(texts, seed, max_texts)
    opened = open_model(model, device, dtype, attention)
    result = find_roles_of(
        model, *opened, drawn, evidence, max_tokens, relations,
        heads=heads or None, roles=names or None,
    )  # fmt: skip
    for line in result.notes:
        print_note(line)
    print_note(str(result))
    _options.write_output("All heads with their evidence", result.save, out, force)
    _options.write_figure("A map of the roles", result.plot, figure, force)
    if as_json:
        print_json([*result.found().to_dict("records"), *nearest_rows(result)])
        return
    if out is None:
        print_roles(result)
    print_outcomes(result, [path.rpartition(":")[2] for path in relation or ()])


def find_roles_of(
    name: str,
    model: "nn.Module",
    tokenizer: Any,
    texts: "Sequence[str | AnnotatedText]",
    evidence: "Evidence",
    max_tokens: int | None,
    relations: "Relations | None" = None,
    **named: Sequence[str] | None,
) -> "Roles":
    """Find the roles of the heads of an open model, behind a progress bar; `report` does, too."""
    from headwise.roles import FEWEST_TEXTS, find_roles

    if len(texts) // 2 < FEWEST_TEXTS:
        print_note(
            f"Of {counted(len(texts), 'text')} no role of text can be tested, only roles on "
            f"sequences of random tokens: give {2 * FEWEST_TEXTS} distinct texts or more"
        )
    with progress_bar(f"Finding the roles of the heads of {name}") as on_progress:
        return find_roles(
            model,
            texts,
            tokenizer=tokenizer,
            relations=relations,
            evidence=evidence,
            max_tokens=max_tokens,
            on_progress=on_progress,
            **named,
        )


def nearest_rows(result: "Roles") -> list[dict[Hashable, Any]]:
    """For each shown role that no head has, the row of the head that comes nearest."""
    from headwise.roles import shown_outcomes

    outcomes = shown_outcomes(result.outcomes())
    without = outcomes[outcomes["heads"] == 0]
    nearest = without[["role", "nearest"]].rename(columns={"nearest": "name"})
    return nearest.merge(result.frame(), on=["role", "name"]).to_dict("records")


def print_roles(result: "Roles") -> None:
    """Print the roles of heads, and their shapes of attention."""
    rows = _built_in_last(result.found())
    shown = rows.assign(role=rows["label"])
    print_table(shown[["name", "role", "effect", "baseline", "null", "lift", "p_adj"]])
    shapes = result.shapes()
    if len(shapes):
        columns = ["name", "shape", "token", "attention", "value", "carries", "short", "long"]
        print_note("Apart from roles:")
        print_table(shapes[[*columns, "evenness"]])


def print_outcomes(result: "Roles", own: Sequence[str] = ()) -> None:
    """Print what became of each role, of relations of one's own also without a pair."""
    import pandas as pd

    from headwise.roles import shown_outcomes

    outcomes = result.outcomes()
    is_own = outcomes["role"].map(lambda role: role.removesuffix(" back") in own)
    shown = is_own | outcomes.index.isin(shown_outcomes(outcomes).index)
    rows = pd.concat([outcomes[is_own], _built_in_last(outcomes[shown & ~is_own])])
    tested = rows["outcome"].isin(["found", "not found"])
    against = rows["outcome"].where(~tested, rows["outcome"] + ", against " + rows["null"])
    rows["outcome"] = against.str.ljust(against.str.len().max())
    print_table(rows[_OUTCOME].rename(columns={"role": "name"}))


def _built_in_last(rows: "pd.DataFrame") -> "pd.DataFrame":
    """The roles of relations and annotations of one's own first, otherwise as they are."""
    from headwise.roles.relations import BUILT_IN

    is_built_in = rows["role"].isin(BUILT_IN)
    return rows.loc[is_built_in.sort_values(kind="stable").index]


def _load_relations(sources: Sequence[str], model: str) -> "dict[str, Relation]":
    """The functions and choices that `FILE.py:NAME` name, by name. Each file is run once.

    Only files that the user names are run, and none in the folder of the model.

    Raises:
        ArgumentError: a source is not FILE.py:NAME, lies in the model's folder, or two have one
            name.
        InputError: the file cannot be read or fails, or has no such function of one argument and
            no such `ChoiceRelation` or `Role`.
    """
    relations: dict[str, Relation] = {}
    for source in sources:
        file, _, name = source.rpartition(":")
        if not file.endswith(".py") or not name.isidentifier():
            raise ArgumentError(
                f"--relation: {source!r} is not FILE.py:NAME. Name a Python file and a function "
                f"in it."
            )
        if name in relations:
            raise ArgumentError(f"--relation: two functions are called {name}. Rename one.")
        path = Path(file).resolve()
        if Path(model).is_dir() and path.is_relative_to(Path(model).resolve()):
            raise ArgumentError(
                f"--relation: {file} lies in the folder of the model, whose code is never run. "
                f"Give a file of your own."
            )
        relations[name] = _relation(path, name)
    return relations


def _relation(path: Path, name: str) -> "Relation":
    from headwise.roles import ChoiceRelation, Role

    if not path.is_file():
        raise InputError(f"--relation: {path} is not a file. Give FILE.py:NAME.")
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    try:  # an import would leave a folder of compiled modules beside the file
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    except (Exception, SystemExit) as error:  # whatever the file raises
        raise InputError(
            f"--relation: {path} fails ({type(error).__name__}: {error}). Correct it."
        ) from error
    relation: Any = getattr(module, name, None)
    if not callable(relation) and not isinstance(relation, ChoiceRelation | Role):
        names = [key for key, value in vars(module).items() if _is_relation(value)]
        raise InputError(
            f"--relation: {path} has no function {name}.{did_you_mean(name, names)} It has "
            f"{', '.join(names) or 'none'}."
        )
    parts = {name: relation}
    if isinstance(relation, ChoiceRelation | Role):
        parts = {f"{name}.pairs": relation.pairs, f"{name}.candidates": relation.candidates}
    for part, function in parts.items():
        if function is not None:
            _check_takes_text(function, path, part)
    return relation


def _is_relation(value: Any) -> bool:
    """Whether a name of a file may be a relation: a function, a choice or a role, and no class."""
    from headwise.roles import ChoiceRelation, Role

    return isinstance(value, ChoiceRelation | Role) or (
        callable(value) and not isinstance(value, type)
    )


def _check_takes_text(function: Any, path: Path, name: str) -> None:
    """Refuse a function that takes more than one argument, or none."""
    try:
        with suppress(ValueError):  # a built-in function may have no signature
            signature(function).bind(None)
    except TypeError as error:
        raise InputError(
            f"--relation: {name}{signature(function)} in {path} cannot be called with one "
            f"argument, the TokenText ({error}). Write def {name}(text): ..."
        ) from error
