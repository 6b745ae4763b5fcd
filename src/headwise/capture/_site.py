"""A place in a model where heads attend."""

from dataclasses import dataclass

from headwise.tables import Head


@dataclass(frozen=True, eq=False)  # sites are looked up at every call, by identity
class Site:
    """A place in a model where heads attend, or where attention is expected but not captured.

    Attributes:
        name: The module's qualified name.
        stack: The stack it belongs to; empty if the model has one.
        layer: Its index in that stack, in the order in which layers are called; -1 if no call
            was captured.
        cross: Whether its keys belong to another text than its queries.
        watched: How its calls are captured; empty where none was.
        reason: Why no call was captured; empty where one was.
        kernel: What computes the model's own output.
        statistics: What computes its statistics.
        coverage: Which of a text's queries its latest pass captured: all of them, some (the rest of
            a block-sparse attention is not read, say), or all within windows.
        first_head: The number of the first head that this process computes, above 0 under tensor
            parallelism.
    """

    name: str
    stack: str
    layer: int = -1
    n_heads: int = 0
    n_kv_heads: int = 0
    cross: bool = False
    watched: str = ""
    reason: str = ""
    kernel: str = ""
    statistics: str = ""
    coverage: str = ""
    first_head: int = 0

    def __str__(self) -> str:
        return self.name or "the model"  # the module of a model that is one attention

    def heads(self) -> tuple[Head, ...]:
        numbers = range(self.first_head, self.first_head + self.n_heads)
        return tuple(Head(self.stack, self.layer, head) for head in numbers)

    def kv_heads(self) -> list[int]:
        """The key/value head that each head reads."""
        share = self.n_heads // self.n_kv_heads
        return [n // share for n in range(self.first_head, self.first_head + self.n_heads)]
