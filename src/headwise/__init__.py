"""Multi-head attention, head by head.

`load` opens a model, `load_tokenizer` its tokenizer. See what its heads do: the weights of a text
(`attentions`, `links`, `look`), statistics while it runs (`observe`, `Request`, `HeadTable`) or
trains (`HeadMonitor`), roles (`find_roles`, `find_heads`), effects on an answer (`effects`,
`ablate`), two models beside each other (`compare`), and all on one page (`study`). Score heads
(`importance`, `prune_curves`), make the model smaller (`plan`, `costs`, `prune`, `recover`, `save`)
or its cache (`cache_plan`). Or build attention (`attend`, `MultiHeadAttention` with `RoPE` and
`KVCache`, `masks`, and the definition in `reference`).

Importing this package imports nothing else: each name is imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwise import errors as errors
    from headwise import masks as masks
    from headwise import reference as reference
    from headwise._progress import progress as progress
    from headwise.attention import fast_attention as fast_attention
    from headwise.attention import register_attention as register_attention
    from headwise.batches import BatchObserver as BatchObserver
    from headwise.caching import CachePlan as CachePlan
    from headwise.caching import cache_plan as cache_plan
    from headwise.caching import load_duo_attention as load_duo_attention
    from headwise.caching import save_duo_attention as save_duo_attention
    from headwise.checkpoints import load as load
    from headwise.checkpoints import load_tokenizer as load_tokenizer
    from headwise.checkpoints import save as save
    from headwise.corpora import Example as Example
    from headwise.errors import HeadwiseError as HeadwiseError
    from headwise.head_effects import HeadEffects as HeadEffects
    from headwise.head_effects import effects as effects
    from headwise.kernels import attend as attend
    from headwise.layer import KVCache as KVCache
    from headwise.layer import MultiHeadAttention as MultiHeadAttention
    from headwise.layer import RoPE as RoPE
    from headwise.monitor import HeadMonitor as HeadMonitor
    from headwise.monitor import QKClip as QKClip
    from headwise.ownership import ablate as ablate
    from headwise.recovery import recover as recover
    from headwise.regions import image_regions as image_regions
    from headwise.report import compare as compare
    from headwise.report import load_study as load_study
    from headwise.report import look as look
    from headwise.report import study as study
    from headwise.roles import Evidence as Evidence
    from headwise.roles import Role as Role
    from headwise.roles import Roles as Roles
    from headwise.roles import align as align
    from headwise.roles import find_alignment_heads as find_alignment_heads
    from headwise.roles import find_heads as find_heads
    from headwise.roles import find_roles as find_roles
    from headwise.roles import load_heads as load_heads
    from headwise.scoring import importance as importance
    from headwise.scoring import prune_curves as prune_curves
    from headwise.surgery import Costs as Costs
    from headwise.surgery import Plan as Plan
    from headwise.surgery import costs as costs
    from headwise.surgery import plan as plan
    from headwise.surgery import prune as prune
    from headwise.tables import Head as Head
    from headwise.tables import HeadTable as HeadTable
    from headwise.tables import Scores as Scores
    from headwise.watch import Request as Request
    from headwise.watch import attentions as attentions
    from headwise.watch import links as links
    from headwise.watch import observe as observe

# The public names of each folder or file; those of "" are modules.
_NAMES = {
    "": "errors masks reference",
    "_progress": "progress",
    "attention": "fast_attention register_attention",
    "batches": "BatchObserver",
    "caching": "cache_plan CachePlan load_duo_attention save_duo_attention",
    "checkpoints": "load load_tokenizer save",
    "corpora": "Example",
    "errors": "HeadwiseError",
    "head_effects": "effects HeadEffects",
    "kernels": "attend",
    "layer": "KVCache MultiHeadAttention RoPE",
    "monitor": "HeadMonitor QKClip",
    "ownership": "ablate",
    "recovery": "recover",
    "regions": "image_regions",
    "report": "compare load_study look study",
    "roles": "align Evidence find_alignment_heads find_heads find_roles load_heads Role Roles",
    "scoring": "importance prune_curves",
    "surgery": "Costs costs Plan plan prune",
    "tables": "Head HeadTable Scores",
    "watch": "attentions links observe Request",
}
_HOME = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'headwise' has no attribute {name!r}")
    home = _HOME[name]
    if not home:
        return import_module(f"headwise.{name}")
    value = globals()[name] = getattr(import_module(f"headwise.{home}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
