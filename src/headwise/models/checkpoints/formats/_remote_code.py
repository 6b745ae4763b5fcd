"""A pruned model with the code that opens it in Transformers without headwise."""

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

from headwise._tensors import output_errors
from headwise.errors import UnsupportedError
from headwise.models.checkpoints.formats import _resize

_MODULE = "modeling_headwise"
_CLASSES = Template('''

from transformers import $config, $base


class Headwise$config($config):
    """The configuration, and what differs in single modules."""

    headwise: dict | None = None


class Headwise$base($base):
    """A $base with fewer heads, written by headwise."""

    config_class = Headwise$config

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        shrink(self, **config.headwise)
''')


def write_remote(model: Any, changes: Mapping[str, Any], folder: Path) -> None:
    """Write a model that `from_pretrained(folder, trust_remote_code=True)` opens.

    Args:
        changes: How it differs from what its configuration builds.
    Raises:
        UnsupportedError: no AutoModel class of Transformers opens its configuration as this class.
    """
    base, config = type(model), type(model.config)
    opened_by = _auto_classes(base, config)
    # Transformers translates no weight names for foreign classes, so those in memory are written.
    with output_errors(folder / "model.safetensors"):
        model.save_pretrained(folder, save_original_format=False)
    names = {"base": base.__name__, "config": config.__name__}
    code = inspect.getsource(_resize) + _CLASSES.substitute(names)
    (folder / f"{_MODULE}.py").write_text(code, "utf-8")
    classes = {"AutoConfig": f"{_MODULE}.Headwise{config.__name__}"}
    classes |= dict.fromkeys(opened_by, f"{_MODULE}.Headwise{base.__name__}")
    path = folder / "config.json"
    content = json.loads(path.read_text("utf-8"))
    content |= {
        "architectures": [f"Headwise{base.__name__}"],
        "auto_map": classes,
        "headwise": {name: changes[name] for name in ("tensors", "counts", "heads")},
    }
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def _auto_classes(base: type, config: type) -> list[str]:
    """The AutoModel classes that choose `base` for its configuration."""
    import transformers

    classes = []
    # Other attributes are not touched: that would import all of transformers.
    for name in [name for name in dir(transformers) if name.startswith("AutoModel")]:
        mapping: Any = getattr(getattr(transformers, name), "_model_mapping", None)
        if mapping is not None:
            chosen = mapping.get(config, ())
            if base in (chosen if isinstance(chosen, tuple) else (chosen,)):
                classes.append(name)
    if not classes:
        raise UnsupportedError(
            f"save: no AutoModel of Transformers opens a {base.__name__}. Choose the format "
            f"'headwise' or 'padded'."
        )
    return classes
