"""The model of a run: its Megatron configuration, layers and provider."""

from slime.utils.moved import moved

_PUBLIC = {
    name: f"slime.backends.megatron_utils.model.provider.{name}"
    for name in ("get_model", "model_provider", "padded_vocab_size")
}
__all__ = list(_PUBLIC)
__getattr__ = moved(__name__, _PUBLIC, for_good=_PUBLIC)
