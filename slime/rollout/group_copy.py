"""Copies of groups that later generation does not change, much cheaper than ``copy.deepcopy``."""

from __future__ import annotations

import copy
from typing import Any

from slime.utils.types import Sample

_SHARED = ("multimodal_inputs", "multimodal_train_inputs")
"""Large and never changed in place: copied one level deep."""

_UNCHANGING = frozenset({type(None), bool, int, float, str, Sample.Status})


def copy_group(group: Any) -> Any:
    """Return a copy of a (nested) list of samples; tensors, arrays and images are shared with the original."""
    return [copy_group(item) for item in group] if isinstance(group, list) else copy_sample(group)


def copy_sample(sample: Sample) -> Sample:
    """Return a copy of one sample with lists, counters and metadata of its own."""
    new = _shallow(sample)
    for name, value in sample.__dict__.items():
        if type(value) in _UNCHANGING:
            continue
        if isinstance(value, list):
            new.__dict__[name] = value.copy()
        elif isinstance(value, dict):
            new.__dict__[name] = value.copy() if name in _SHARED else _copy_dict(value)
        elif isinstance(value, (Sample.SpecInfo, Sample.PrefixCacheInfo)):
            new.__dict__[name] = _shallow(value)
    return new


def copy_prompt(sample: Sample) -> Sample:
    """Return ``copy.deepcopy(sample)``, in a fraction of the time for one whose fields are mostly empty."""
    new = _shallow(sample)
    for name, value in sample.__dict__.items():
        if type(value) in _UNCHANGING:
            continue
        if isinstance(value, (Sample.SpecInfo, Sample.PrefixCacheInfo)):
            new.__dict__[name] = _shallow(value)
        elif type(value) in (list, dict) and not value:
            new.__dict__[name] = type(value)()
        else:
            new.__dict__[name] = copy.deepcopy(value)
    return new


def _shallow(value: Any) -> Any:
    """``copy.copy`` of an object that is all in its dictionary, several times faster."""
    new = object.__new__(type(value))
    new.__dict__.update(value.__dict__)
    return new


def _copy_dict(value: dict[Any, Any]) -> dict[Any, Any]:
    if not value:
        return {}
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001  (a user's object that cannot be copied, a lock or a tensor in a graph, is shared)
        return value.copy()
