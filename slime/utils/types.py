"""The sample that travels from prompt to training batch, and the few types that travel with it.

Importable without torch; tensors are accepted wherever a sequence of numbers is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Self

from slime.utils.declared import with_defaults
from slime.utils.misc import decode_int32_meta_array, first_present, to_int32_tensor

if TYPE_CHECKING:
    from slime.arguments.args import Args

RolloutBatch = dict[str, Any]
"""Training data of one rollout, as hooks have it: column name -> list (one entry per sample) or whole-batch value."""


@dataclass
class Sample:
    """One prompt with (part of) one response.

    ``tokens`` are prompt + response ids; ``response_length`` counts everything after the first prompt, tool text
    included. ``loss_mask``, ``rollout_log_probs`` and ``teacher_log_probs`` have ``response_length`` entries, a
    ``loss_mask`` of None means all ones. ``weight_versions`` has one entry per engine call; ``weight_version_spans``
    says which response tokens each version made: ``{"version", "start", "end"}``, in order; tokens that no engine made
    are in none. A span with ``"at_end": True`` names the version at the end of a request that may have lived through
    a change; rollout functions add the ``"step"`` of the training (``slime.rollout.staleness``). ``trace`` is the
    carrier of ``slime.observability.trace_utils``. Plugins may set further attributes; they survive
    ``to_dict``/``from_dict``.
    """

    class Status(Enum):
        """State of a sample. FAILED is a recoverable problem with possibly valid content; only plugins set it."""

        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    @dataclass
    class SpecInfo:
        """Speculative-decoding counters summed over the engine calls of one sample."""

        spec_accept_token_num: int = 0
        spec_draft_token_num: int = 0
        spec_verify_ct: int = 0
        completion_token_num: int = 0

        @property
        def spec_accept_rate(self) -> float:
            """Accepted draft tokens / proposed draft tokens; 0.0 before any draft."""
            return self.spec_accept_token_num / self.spec_draft_token_num if self.spec_draft_token_num else 0.0

        @property
        def spec_accept_length(self) -> float:
            """Completion tokens / verification steps; 0.0 before any verification."""
            return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0

        def add(self, meta_info: Mapping[str, Any]) -> None:
            """Add the counters of one engine reply (missing ones count 0)."""
            self.spec_accept_token_num += meta_info.get("spec_accept_token_num") or 0
            self.spec_draft_token_num += meta_info.get("spec_draft_token_num") or 0
            self.spec_verify_ct += meta_info.get("spec_verify_ct") or 0
            self.completion_token_num += meta_info.get("completion_tokens") or 0

        def to_dict(self) -> dict[str, int]:
            return dict(self.__dict__)

        @staticmethod
        def from_dict(data: Mapping[str, int]) -> Sample.SpecInfo:
            return Sample.SpecInfo(**{name: data.get(name, 0) for name in Sample.SpecInfo.__dataclass_fields__})

    @dataclass
    class PrefixCacheInfo:
        """Prefix-cache counters summed over the engine calls of one sample."""

        cached_tokens: int = 0
        total_prompt_tokens: int = 0

        @property
        def prefix_cache_hit_rate(self) -> float:
            """Prompt tokens served from the cache / prompt tokens; 0.0 before any call."""
            return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0

        def add(self, meta_info: Mapping[str, Any]) -> None:
            """Add the counters of one engine reply (missing ones count 0)."""
            self.cached_tokens += meta_info.get("cached_tokens") or 0
            self.total_prompt_tokens += meta_info.get("prompt_tokens") or 0

        def to_dict(self) -> dict[str, int]:
            return dict(self.__dict__)

        @staticmethod
        def from_dict(data: Mapping[str, int]) -> Sample.PrefixCacheInfo:
            return Sample.PrefixCacheInfo(
                **{name: data.get(name, 0) for name in Sample.PrefixCacheInfo.__dataclass_fields__}
            )

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None  # the trajectory, shared by its samples; not the number of the iteration
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    weight_version_spans: list[dict[str, Any]] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    teacher_log_probs: Any = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)
    trace: dict[str, Any] | None = field(default=None, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Return a shallow copy of all attributes, with the status as its string and the counters as dicts."""
        return {
            **self.__dict__,
            "status": self.status.value,
            "spec_info": self.spec_info.to_dict(),
            "prefix_cache_info": self.prefix_cache_info.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild a sample (of a subclass: ``Mine.from_dict``) from ``to_dict``'s result, which is left as it is.

        Unknown keys become attributes. Raises KeyError without a ``status`` and ValueError for an unknown one.
        """
        values = dict(data)
        values["status"] = Sample.Status(values["status"])
        values["spec_info"] = Sample.SpecInfo.from_dict(values.get("spec_info") or {})
        values["prefix_cache_info"] = Sample.PrefixCacheInfo.from_dict(values.get("prefix_cache_info") or {})
        known = {name for name, declared in cls.__dataclass_fields__.items() if declared.init}
        sample = cls(**{name: value for name, value in values.items() if name in known})
        for name, value in values.items():
            if name not in known:
                setattr(sample, name, value)
        return sample

    def get_reward_value(self, args: Args) -> Any:
        """Return the reward, or its ``args.reward_key`` entry when that flag is set."""
        args = with_defaults(args)
        if not args.reward_key:
            return self.reward
        if not isinstance(self.reward, Mapping) or args.reward_key not in self.reward:
            raise KeyError(
                f"--reward-key {args.reward_key!r} expects a dict reward with that key, but sample index={self.index} "
                f"has reward {self.reward!r}. Return a dict from the reward function or drop --reward-key."
            )
        return self.reward[args.reward_key]

    @property
    def effective_response_length(self) -> int:
        """Number of response tokens that are trained on: sum of the loss mask, or ``response_length`` without one."""
        return sum(self.loss_mask) if self.loss_mask is not None else self.response_length

    def append_response_tokens(
        self,
        args: Args | None = None,
        *,
        tokens: Iterable[int] | None = None,
        log_probs: Iterable[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append response tokens and everything that is kept per token, and fold in one engine reply's metadata.

        ``tokens`` [n] and ``log_probs`` [n] may be lists or tensors. Trainable tokens get loss mask 1 and need
        log-probs; the others (tool output, templates) get mask 0 and log-prob 0.0 and must not pass any. An empty list
        of log-probs is none.
        ``meta_info`` is the engine's: top-p masks, and routed experts of what was not read before, are merged; unless
        ``update_terminal_info`` is off, a ``finish_reason`` in it updates status, counters and weight versions.

        ``tokens``, ``loss_mask`` and ``rollout_log_probs`` that are lists are extended in place: who holds one sees it
        grow. Raises ValueError when lengths disagree. After that error or any other the sample, and each of its lists,
        is as it was before the call.
        """
        restore = self._snapshot()
        try:
            if text is not None:
                self.response += text
            added = 0
            if tokens is not None:
                added = self._append_tokens(_as_list(tokens), log_probs, trainable)
            elif log_probs is not None and _as_list(log_probs):
                raise ValueError(f"{self._name()}: log_probs were passed without tokens")
            self._append_top_p(added, trainable, meta_info or {})
            if meta_info is not None:
                self._merge_routed_experts(args, meta_info, added)
            self._check_lengths()
            if update_terminal_info and meta_info is not None and meta_info.get("finish_reason"):
                self._record_weight_versions(meta_info, added)
                self.update_from_meta_info(args, meta_info)
        except BaseException:  # an interruption too must leave no half of a turn
            restore()
            raise

    def update_from_meta_info(self, args: Args | None, meta_info: Mapping[str, Any]) -> None:
        """Fold a finished engine call into the counters, weight versions and status."""
        args = with_defaults(args)
        if args is not None and args.sglang_speculative_algorithm:
            self.spec_info.add(meta_info)
        self.prefix_cache_info.add(meta_info)
        if meta_info.get("weight_version") is not None:
            self.weight_versions.append(meta_info["weight_version"])
        reason = meta_info["finish_reason"]
        kind = reason["type"] if isinstance(reason, Mapping) else reason
        self.status = _STATUS_OF_FINISH.get(kind, self.status)

    def _name(self) -> str:
        return f"sample index={self.index} group_index={self.group_index}"

    def _snapshot(self) -> Callable[[], None]:
        """Return a function that undoes an append, also in the lists and counters that it changes in place."""
        before = dict(self.__dict__)
        lengths = [(value, len(value)) for name in _GROW_IN_PLACE if isinstance(value := before[name], list)]
        counters = [(info, dict(info.__dict__)) for info in (self.spec_info, self.prefix_cache_info)]

        def restore() -> None:
            for values, length in lengths:
                del values[length:]
            for info, counts in counters:
                info.__dict__.update(counts)
            self.__dict__.clear()
            self.__dict__.update(before)

        return restore

    def _append_tokens(self, tokens: list[int], log_probs: Iterable[float] | None, trainable: bool) -> int:
        count, earlier = len(tokens), self.response_length
        new_log_probs = None if log_probs is None else _as_list(log_probs)
        if new_log_probs and not trainable:
            raise ValueError(
                f"{self._name()}: non-trainable tokens must not carry log_probs (got {len(new_log_probs)})"
            )
        if trainable and new_log_probs is None and count:
            raise ValueError(f"{self._name()}: {count} trainable tokens need log_probs, none were given")
        if trainable and new_log_probs is not None and len(new_log_probs) != count:
            raise ValueError(f"{self._name()}: {count} tokens but {len(new_log_probs)} log_probs")
        held_log_probs = self.rollout_log_probs
        if held_log_probs is None and earlier:
            if trainable and count:
                raise ValueError(
                    f"{self._name()}: {earlier} earlier response tokens have no rollout_log_probs, so trainable tokens "
                    "with log_probs cannot be appended. Set rollout_log_probs for the earlier tokens first."
                )
            held_log_probs = None if trainable else [0.0] * earlier
        if held_log_probs is not None or not earlier:
            held_log_probs = [] if held_log_probs is None else held_log_probs
            self.rollout_log_probs = _extended(held_log_probs, new_log_probs or [0.0] * count)
        mask = [1] * earlier if self.loss_mask is None else self.loss_mask
        self.loss_mask = _extended(mask, [int(trainable)] * count)
        self.tokens = _extended(self.tokens, tokens)
        self.response_length = earlier + count
        return count

    def _record_weight_versions(self, meta_info: Mapping[str, Any], added: int) -> None:
        """Add the spans of an engine reply of ``added`` tokens.

        One that only names the version at its end does not show which tokens earlier versions made, if any.
        """
        reported = [span for span in meta_info.get("weight_versions") or [] if isinstance(span, Mapping)]
        end_only = {}
        if not reported and meta_info.get("weight_version") is not None:
            reported, end_only = [{"version": meta_info["weight_version"], "start": 0}], {"at_end": True}
        if not reported:
            return
        first = self.response_length - added
        starts = [first + min(int(span["start"]), added) for span in reported]
        spans = [dict(span) for span in self.weight_version_spans]
        for span, start, end in zip(reported, starts, [*starts[1:], first + added], strict=True):
            if start >= end:
                continue
            new = {"version": str(span["version"]), "start": start, "end": end, **end_only}
            if spans and {**spans[-1], "start": start, "end": end} == new and spans[-1]["end"] == start:
                spans[-1]["end"] = (
                    end  # a span that has a step is left alone: version numbers start over after a restart
                )
            else:
                spans.append(new)
        self.weight_version_spans = spans

    def _append_top_p(self, added: int, trainable: bool, meta_info: Mapping[str, Any]) -> None:
        raw_ids = first_present(meta_info, "top_p_token_ids", "top_p_kept_token_ids")
        raw_offsets = first_present(meta_info, "top_p_token_offsets", "top_p_kept_token_offsets")
        if raw_ids is None and raw_offsets is None and meta_info.get("output_token_sampling_mask") is not None:
            raw_ids, raw_offsets = _flattened(meta_info["output_token_sampling_mask"])
        if (raw_ids is None) != (raw_offsets is None):
            raise ValueError(f"{self._name()}: the engine sent only one of top-p token ids and offsets")
        if raw_ids is None:
            if trainable or not added or self.rollout_top_p_token_offsets is None:
                return
            ids, offsets = [], [0] * (added + 1)
        else:
            ids = decode_int32_meta_array(raw_ids).tolist()
            offsets = decode_int32_meta_array(raw_offsets).tolist()
            if len(offsets) != added + 1 or offsets[0] != 0 or offsets[-1] != len(ids):
                raise ValueError(
                    f"{self._name()}: top-p offsets must have {added + 1} entries from 0 to {len(ids)}, "
                    f"got {len(offsets)} entries {offsets[:1]}..{offsets[-1:]}"
                )
        old_ids = [] if self.rollout_top_p_token_ids is None else _as_list(self.rollout_top_p_token_ids)
        if self.rollout_top_p_token_offsets is not None:
            old_offsets = _as_list(self.rollout_top_p_token_offsets)
        else:
            earlier = self.response_length - added
            mask = self.loss_mask or []
            # tokens the engine did not sample have an empty mask; sampled ones without one are an error (below)
            old_offsets = [0] * (1 if any(mask[:earlier]) else earlier + 1)
        self.rollout_top_p_token_ids = to_int32_tensor(old_ids + ids)
        self.rollout_top_p_token_offsets = to_int32_tensor(old_offsets + [old_offsets[-1] + o for o in offsets[1:]])

    def _merge_routed_experts(self, args: Args | None, meta_info: Mapping[str, Any], added: int) -> None:
        """Append the rows that are not held yet, one per token that was read.

        A continued request is read again from its start: of tokens that are held the engine reports what it computed
        now, which is not what those after them were sampled with.
        """
        raw = meta_info.get("routed_experts")
        if raw is None:
            return
        if args is None:
            raise ValueError(
                f"{self._name()}: routed_experts need args.num_layers and args.moe_router_topk, args is None"
            )
        start = meta_info.get("routed_experts_start_len") or 0
        layers, topk = args.num_layers, args.moe_router_topk
        rows = len(self.tokens) - 1 - start
        flat = decode_int32_meta_array(raw)
        if start < 0 or rows < 0 or flat.size != rows * layers * topk:
            raise ValueError(
                f"{self._name()}: routed_experts has {flat.size} entries for start {start}; {len(self.tokens)} tokens, "
                f"{layers} layers and top-{topk} need {max(rows, 0) * layers * topk}"
            )
        new = to_int32_tensor(flat).reshape(rows, layers, topk)
        held = 0 if self.rollout_routed_experts is None else len(self.rollout_routed_experts)
        if self.response_length == added or held >= len(self.tokens) - added:
            held = min(held, start)  # nothing was sampled with them, or they are of other tokens
        if held < start:
            raise ValueError(f"{self._name()}: routed_experts start at token {start}, but only {held} rows are held")
        if held == 0:
            self.rollout_routed_experts = new
            return
        import torch

        before = torch.as_tensor(self.rollout_routed_experts)[:held].to(torch.int32)
        self.rollout_routed_experts = torch.cat([before, new[held - start :]])

    def _check_lengths(self) -> None:
        expected = {
            "loss_mask": self.response_length,
            "rollout_log_probs": self.response_length,
            "rollout_top_p_token_offsets": self.response_length + 1,
        }
        for name, length in expected.items():
            value = getattr(self, name)
            if value is not None and len(value) != length:
                raise ValueError(
                    f"{self._name()}: {name} has {len(value)} entries, expected {length} "
                    f"for response_length {self.response_length}"
                )


_GROW_IN_PLACE = ("tokens", "loss_mask", "rollout_log_probs", "weight_versions")
_STATUS_OF_FINISH = {
    "length": Sample.Status.TRUNCATED,
    "abort": Sample.Status.ABORTED,
    "stop": Sample.Status.COMPLETED,
}


def iter_samples(nested: Sample | list[Any] | tuple[Any, ...]) -> Iterator[Sample]:
    """Yield the samples of an arbitrarily nested list, in order."""
    if isinstance(nested, (list, tuple)):
        for item in nested:
            yield from iter_samples(item)
    else:
        yield nested


@dataclass(frozen=True)
class ParamInfo:
    """Name, shape and owner of one model parameter, as exchanged between training ranks."""

    name: str
    dtype: Any
    shape: Any
    attrs: dict[str, Any]
    size: int
    src_rank: int


@dataclass(frozen=True)
class MultimodalType:
    """A kind of non-text prompt content and its placeholder in a prompt string."""

    name: str
    placeholder: str


class MultimodalTypes:
    """The kinds of non-text content a prompt may hold."""

    IMAGE: ClassVar[MultimodalType] = MultimodalType("image", "<image>")
    VIDEO: ClassVar[MultimodalType] = MultimodalType("video", "<video>")
    AUDIO: ClassVar[MultimodalType] = MultimodalType("audio", "<audio>")

    @classmethod
    def all(cls) -> list[MultimodalType]:
        return [cls.IMAGE, cls.VIDEO, cls.AUDIO]

    @classmethod
    def get(cls, name: str) -> MultimodalType | None:
        """Return the type called ``name``, or None."""
        return next((kind for kind in cls.all() if kind.name == name), None)


def _flattened(rows: Iterable[Iterable[int] | None]) -> tuple[list[int], list[int]]:
    """Return (all entries, where each row begins and the last ends)."""
    flat: list[int] = []
    offsets = [0]
    for row in rows:
        flat.extend(row or ())
        offsets.append(len(flat))
    return flat, offsets


def _extended(held: Iterable[Any], new: list[Any]) -> list[Any]:
    """Return ``held`` itself, extended, when it is a list; a new list in place of an array or a tensor."""
    values: list[Any] = held if isinstance(held, list) else _as_list(held)
    values += new
    return values


def _as_list(values: Iterable[Any]) -> list[Any]:
    """Return a new list of plain Python numbers from a list, tuple, array or tensor."""
    return values.tolist() if hasattr(values, "tolist") else list(values)
