"""The sizes of the attention of a whole model."""

from dataclasses import dataclass

from headwise.counts._sizes import LayerSizes


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a stack of equal attention layers.

    Attributes:
        all_parameters: The parameters of the whole model; None where they are unknown.
        source: The paper or file that the sizes come from.
    """

    name: str
    layer: LayerSizes
    n_layers: int
    all_parameters: int | None = None
    source: str = ""

    def parameters(self) -> int:
        """The parameters of all attention layers together."""
        return self.n_layers * sum(self.layer.parameters().values())

    def share(self) -> float | None:
        """The attention's share of the model's parameters, from 0 to 1; None if it is unknown."""
        return None if self.all_parameters is None else self.parameters() / self.all_parameters

    def cache_bytes(self, dtype: str = "bfloat16") -> int:
        """The bytes of the keys and values of one token in all layers."""
        return self.n_layers * self.layer.cache_bytes(dtype)
