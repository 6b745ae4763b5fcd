"""A smaller model with the code that opens it: for those who have Transformers and not headwise."""

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

from headwise._tensors import output_errors
from headwise.errors import UnsupportedError
from headwise.models.checkpoints import _resize

_MODULE = "modeling_headwise"
_CLASSES = Template('''

from transformers import $config, $base


class Headwise$config($config):
    """Of each layer, what the number of its heads decides."""

    headwise: dict | None = None


class Headwise$base($base):
    """A $base with fewer heads, written by headwise."""

    config_class = Headwise$config

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        shrink(self, **config.headwise)
''')


def write_remote(model: Any, about: Mapping[str, Any], folder: Path) -> None:
    """Write a model that `from_pretrained(folder, trust_remote_code=True)` opens.

    Args:
        about: How it differs from what its configuration says.
    Raises:
        UnsupportedError: no class of Transformers opens models like it by their configuration.
    """
    base, config = type(model), type(model.config)
    opened_by = _auto_classes(base, config)
    # Its names are those in memory: for foreign classes Transformers translates none.
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
        "headwise": {name: about[name] for name in ("tensors", "counts", "heads")},
    }
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def _auto_classes(base: type, config: type) -> list[str]:
    """The classes of Transformers that choose `base` for its configuration."""
    import transformers

    found = []
    # To look at the other names would import all of transformers.
    for name in [name for name in dir(transformers) if name.startswith("AutoModel")]:
        known: Any = getattr(getattr(transformers, name), "_model_mapping", None)
        if known is not None:
            chosen = known.get(config, ())
            if base in (chosen if isinstance(chosen, tuple) else (chosen,)):
                found.append(name)
    if not found:
        raise UnsupportedError(
            f"save: no AutoModel of Transformers opens a {base.__name__}. Choose the format "
            f"'headwise' or 'padded'."
        )
    return found
