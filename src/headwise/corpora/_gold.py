"""Lines of the grammar as annotated texts: trees, mentions and links known by construction."""

from collections.abc import Iterator

from headwise.corpora._grammar import Line
from headwise.corpora._text import AnnotatedText, Arc, Mention, Span
from headwise.corpora._verbs import ADVERBS, PRONOUNS

_TAG = {",": "PUNCT", "=": "PUNCT"}
_TAG |= dict.fromkeys([*PRONOUNS, *PRONOUNS.values()], "PRON")
_TAG |= dict.fromkeys([*ADVERBS, *ADVERBS.values()], "ADV")
_ARC = {"PRON": "nsubj", "ADV": "advmod"}


def annotate(line: Line) -> AnnotatedText:
    """What is known of a line: of a repeated sequence, its words alone.

    Every word hangs on the verb of its clause, a comma on the verb after it, the verb of a
    later clause on the first one of its language (`conj`), and the Spanish half on the English
    one (`parataxis`). A pronoun and its translation speak of one entity. Each Spanish word is
    linked with the English word that it translates.
    """
    text = str(line)
    ends: list[Span] = []
    for word in line.words:
        start = ends[-1][1] + 1 if ends else 0
        ends.append((start, start + len(word)))
    if line.verb is None:
        return AnnotatedText(text, tuple(ends))
    tags = tuple(_TAG.get(word, "VERB") for word in line.words)
    half = line.words.index("=")
    pairs = [(half + 1 + at, at) for at in range(half)]
    pronouns = [(one, other) for one, other in pairs if tags[other] == "PRON"]
    return AnnotatedText(
        text,
        tuple(ends),
        tags=tags,
        arcs=tuple(_arcs(tags, half)),
        mentions=tuple(
            Mention(*ends[at], entity) for entity, both in enumerate(pronouns) for at in both
        ),
        links=tuple((one, other) for one, other in pairs if tags[other] != "PUNCT"),
    )


def _arcs(tags: tuple[str, ...], half: int) -> Iterator[Arc]:
    verbs = [at for at, tag in enumerate(tags) if tag == "VERB"]
    root, spanish = verbs[0], verbs[len(verbs) // 2]
    for at, tag in enumerate(tags):
        if tag == "VERB":
            if at == spanish:
                yield Arc(at, root, "parataxis")
            elif at != root:
                yield Arc(at, root if at < half else spanish, "conj")
        else:
            verb = next(verb for verb in verbs if verb > at)
            yield Arc(at, verb, _ARC.get(tag, "punct"))
