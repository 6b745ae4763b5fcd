"""Gold annotations of the grammar: trees, mentions and links known by construction."""

from collections.abc import Iterator

from headwise.corpora._grammar import Line
from headwise.corpora._text import AnnotatedText, Arc, Mention, Span
from headwise.corpora._verbs import ADVERBS, PRONOUNS

_TAG = {",": "PUNCT", "=": "PUNCT"}
_TAG |= dict.fromkeys([*PRONOUNS, *PRONOUNS.values()], "PRON")
_TAG |= dict.fromkeys([*ADVERBS, *ADVERBS.values()], "ADV")
_ARC = {"PRON": "nsubj", "ADV": "advmod"}


def annotate(line: Line) -> AnnotatedText:
    """Annotate a line of the grammar; a repeated sequence gets its words alone.

    Every word depends on the verb of its clause, a comma on the verb after it, the verb of a
    later clause on the first verb of its language (`conj`), and the first Spanish verb on the
    first English one (`parataxis`). A pronoun and its translation are mentions
    of one entity. Each Spanish word is linked with the English word that it translates.
    """
    text = str(line)
    spans: list[Span] = []
    for word in line.words:
        start = spans[-1][1] + 1 if spans else 0
        spans.append((start, start + len(word)))
    if line.verb is None:
        return AnnotatedText(text, tuple(spans))
    tags = tuple(_TAG.get(word, "VERB") for word in line.words)
    half = line.words.index("=")
    pairs = [(half + 1 + source, source) for source in range(half)]
    pronouns = [(word, source) for word, source in pairs if tags[source] == "PRON"]
    return AnnotatedText(
        text,
        tuple(spans),
        tags=tags,
        arcs=tuple(_arcs(tags, half)),
        mentions=tuple(
            Mention(*spans[word], entity)
            for entity, pronoun_pair in enumerate(pronouns)
            for word in pronoun_pair
        ),
        links=tuple((word, source) for word, source in pairs if tags[source] != "PUNCT"),
    )


def _arcs(tags: tuple[str, ...], half: int) -> Iterator[Arc]:
    verbs = [word for word, tag in enumerate(tags) if tag == "VERB"]
    root, spanish = verbs[0], verbs[len(verbs) // 2]
    for word, tag in enumerate(tags):
        if tag == "VERB":
            if word == spanish:
                yield Arc(word, root, "parataxis")
            elif word != root:
                yield Arc(word, root if word < half else spanish, "conj")
        else:
            verb = next(verb for verb in verbs if verb > word)
            yield Arc(word, verb, _ARC.get(tag, "punct"))
