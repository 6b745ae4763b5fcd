"""Which part of a model belongs to which head."""

from headwise.models.owning._projection import OutputProjection, output_projection

__all__ = ["OutputProjection", "output_projection"]
