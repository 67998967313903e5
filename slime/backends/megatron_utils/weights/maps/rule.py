"""The form of a weight map: a family is a list of rules, each tying a Megatron parameter to Hugging Face tensors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from slime.backends.megatron_utils.weights.layouts import Layout

LAYER = "{layer}"


@dataclass(frozen=True)
class Rule:
    """``megatron``: the parameter's name, and its other names (TransformerEngine fuses norms into linear layers).

    ``{layer}`` stands for the zero-based global layer number. ``hf``: the tensors it is made of, in the layout's order.
    """

    megatron: tuple[str, ...]
    hf: tuple[str, ...]
    layout: Layout

    def hf_names(self, layer: int | None) -> list[str]:
        """Return the Hugging Face names for ``layer`` (None for a parameter outside the layers)."""
        return [name.replace(LAYER, str(layer)) for name in self.hf]


@dataclass(frozen=True)
class Family:
    """A model family: ``model_types`` are the values of ``model_type`` in ``config.json`` that it covers.

    ``ignored``: regular expressions of Hugging Face tensors that hold nothing to load (buffers of old checkpoints).
    """

    name: str
    model_types: tuple[str, ...]
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()

    @cached_property
    def _by_template(self) -> dict[str, Rule]:
        return {template: rule for rule in self.rules for template in rule.megatron}

    @cached_property
    def _hf_templates(self) -> frozenset[str]:
        return frozenset(name for rule in self.rules for name in rule.hf)

    def find(self, megatron_name: str) -> tuple[Rule, int | None]:
        """Return the rule for a global Megatron name, and its layer number.

        Raises ValueError, naming the family, for a parameter that the map does not know.
        """
        template, layer = as_template(megatron_name)
        if template not in self._by_template:
            raise ValueError(
                f"the weight map of {self.name!r} has no rule for the parameter {megatron_name!r}; it knows "
                f"{sorted(self._by_template)}. Do the model flags describe the checkpoint?"
            )
        return self._by_template[template], layer

    def knows_hf(self, hf_name: str) -> bool:
        """Return whether a rule mentions this Hugging Face name (of any layer)."""
        return as_template(hf_name)[0] in self._hf_templates

    def ignores_hf(self, hf_name: str) -> bool:
        """Return whether the Hugging Face tensor is one that may be left unread."""
        return any(re.search(pattern, hf_name) for pattern in self.ignored)


def as_template(name: str) -> tuple[str, int | None]:
    """Split a name of either side into template and layer: ``a.layers.3.b`` -> ``("a.layers.{layer}.b", 3)``."""
    match = re.search(r"(?<=\blayers\.)\d+(?=\.)", name)
    if match is None:
        return name, None
    return name[: match.start()] + LAYER + name[match.end() :], int(match.group())
