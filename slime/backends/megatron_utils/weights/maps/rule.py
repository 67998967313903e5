"""The form of a weight map: a family is a list of rules, each tying a Megatron parameter to Hugging Face tensors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from slime.backends.megatron_utils.weights.layouts import Layout

LAYER, EXPERT, BLOCK = "{layer}", "{expert}", "{block}"
_LAYER_NUMBER = re.compile(r"(?:(?<=\blayers\.)|(?<=\bmtp_layers\.))\d+(?=\.)")
# One module per expert (`experts.3.`, `local_experts.3.`), or one grouped module with a weight per expert (`weight3`).
_EXPERT_NUMBER = re.compile(
    r"(?<=experts\.)\d+(?=\.)|(?<=experts\.linear_fc\d\.weight)\d+$|(?<=experts\.linear_fc\d\.bias)\d+$"
)
_BLOCK_NUMBER = re.compile(r"(?:(?<=\bvisual\.blocks\.)|(?<=\bdeepstack_merger_list\.))\d+(?=\.)")


@dataclass(frozen=True)
class Rule:
    """``megatron``: the parameter's name, and its other names (TransformerEngine fuses norms into linear layers).

    ``{layer}`` is the zero-based global layer number, ``{expert}`` the number of a routed expert, ``{block}`` that of a
    block of a vision tower, all of which are on the first pipeline stage. ``hf``:
    the tensors it is made of, in the layout's order. A rule with ``{expert}`` on Megatron's side alone means that the
    Hugging Face tensors stack all experts of the layer along a new first dimension; the layout describes one expert.
    ``with_experts`` is the one of ``megatron`` that a layer with routed experts has, where that is not the first.
    """

    megatron: tuple[str, ...]
    hf: tuple[str, ...]
    layout: Layout
    with_experts: str | None = None

    @property
    def is_expert(self) -> bool:
        """Return whether it is about routed experts, which are split over the expert-parallel ranks."""
        return EXPERT in self.megatron[0]

    @property
    def is_stacked(self) -> bool:
        """Return whether a Hugging Face tensor holds all experts of a layer."""
        return self.is_expert and not any(EXPERT in name for name in self.hf)

    def hf_names(self, layer: int | None, expert: int | None = None, block: int | None = None) -> list[str]:
        """Return the Hugging Face names for ``layer``, ``expert`` and ``block`` (None for a parameter outside)."""
        numbers = {LAYER: layer, EXPERT: expert, BLOCK: block}
        names = list(self.hf)
        for placeholder, number in numbers.items():
            names = [name.replace(placeholder, str(number)) for name in names]
        return names


@dataclass(frozen=True)
class MTPLayers:
    """The MTP layers of a family (``--mtp-num-layers``): their ``rules``, and their tensors.

    ``pattern`` is a regular expression of them; without it they are in layers numbered on after the last one (and
    ``{layer}`` of the rules is that number on Hugging Face's side). ``copies``: tensors among them that repeat
    another one, which is all that the model has, and that one.
    """

    rules: tuple[Rule, ...]
    pattern: str | None = None
    copies: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Family:
    """A model family: ``model_types`` are the values of ``model_type`` in ``config.json`` that it covers.

    ``ignored``: regular expressions of Hugging Face tensors that hold nothing to load (buffers of old checkpoints).
    ``carried``: those of parts that are not built (a vision tower), which an export takes over as they are; without
    ``--mtp-num-layers`` it does so with the tensors of ``mtp``, too. ``tower``: rules of a vision tower, whose
    tensors are carried as well, for a model that trains it.
    """

    name: str
    model_types: tuple[str, ...]
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()
    mtp: MTPLayers | None = None
    tower: tuple[Rule, ...] = ()

    @property
    def _all_rules(self) -> tuple[Rule, ...]:
        return self.rules + (self.mtp.rules if self.mtp else ())

    @cached_property
    def _by_template(self) -> dict[str, Rule]:
        return {template: rule for rule in (*self._all_rules, *self.tower) for template in rule.megatron}

    @cached_property
    def _hf_templates(self) -> frozenset[str]:
        return frozenset(name for rule in self._all_rules for name in rule.hf)

    @cached_property
    def embedding(self) -> str:
        """Return the Hugging Face name of the token embedding, which is the output layer too where they are tied."""
        return self.find("embedding.word_embeddings.weight")[0].hf[0]

    def find(self, megatron_name: str) -> tuple[Rule, Place]:
        """Return the rule for a global Megatron name, and the layer and expert that the name is about.

        Raises ValueError, naming the family, for a parameter that the map does not know.
        """
        place = as_template(megatron_name)
        if place.template not in self._by_template:
            raise ValueError(
                f"the weight map of {self.name!r} has no rule for the parameter {megatron_name!r}; it knows "
                f"{sorted(self._by_template)}. Do the model flags describe the checkpoint?"
            )
        return self._by_template[place.template], place

    def knows(self, megatron_name: str) -> bool:
        """Return whether a rule is about this global Megatron name."""
        return as_template(megatron_name).template in self._by_template

    def knows_hf(self, hf_name: str) -> bool:
        """Return whether a rule, not of a tower, mentions this Hugging Face name (of any layer and expert)."""
        return as_template(hf_name).template in self._hf_templates

    def ignores_hf(self, hf_name: str) -> bool:
        """Return whether the Hugging Face tensor is one that may be left unread."""
        return any(re.search(pattern, hf_name) for pattern in self.ignored)

    def carries_hf(self, hf_name: str, extra_layers: range) -> bool:
        """Return whether it is carried, or of an MTP layer; ``extra_layers``: layer numbers after the last."""
        return self.is_mtp_hf(hf_name, extra_layers) or any(re.search(p, hf_name) for p in self.carried)

    def is_mtp_hf(self, hf_name: str, extra_layers: range) -> bool:
        """Return whether the tensor belongs to an MTP layer."""
        if self.mtp is None:
            return False
        if self.mtp.pattern is None:
            return as_template(hf_name).layer in extra_layers
        return re.search(self.mtp.pattern, hf_name) is not None

    def copy_of(self, hf_name: str) -> str | None:
        """Return the tensor that ``hf_name``, in an MTP layer, repeats; None if it does not."""
        return dict(self.mtp.copies).get(as_template(hf_name).template) if self.mtp else None


class Place(NamedTuple):
    """A name of either side without its numbers, and the numbers (None where it has none)."""

    template: str
    layer: int | None
    expert: int | None
    block: int | None


def as_template(name: str) -> Place:
    """Take the numbers out of a name: ``layers.3.b.experts.7.c`` -> ``layers.{layer}.b.experts.{expert}.c``, 3, 7."""
    name, block = _cut(_BLOCK_NUMBER, name, BLOCK)
    name, expert = _cut(_EXPERT_NUMBER, name, EXPERT)
    template, layer = _cut(_LAYER_NUMBER, name, LAYER)
    return Place(template, layer, expert, block)


def _cut(number: re.Pattern[str], name: str, placeholder: str) -> tuple[str, int | None]:
    match = number.search(name)
    if match is None:
        return name, None
    return name[: match.start()] + placeholder + name[match.end() :], int(match.group())
