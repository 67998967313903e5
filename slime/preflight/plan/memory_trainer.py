"""Memory of a GPU of the trainer: weights, gradients, optimizer state, activations, logits, weight transfer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from slime.arguments.args import Args
from slime.arguments.rules.checkpoints import needs_reference, needs_teacher
from slime.models.shape import Experts, Latent, LayerKind, LinearAttention, ModelShape
from slime.preflight.plan.model_size import Chunk, ModelSize, Parallel, RankSize

GIB = 2**30
CONTEXT = 5 * GIB // 2
"""CUDA context, loaded kernels, NCCL's channels of one process; an offloaded one keeps it. A lone rank has 2 GiB."""

LOG_PROB_CHUNK = 2**26  # elements, the most that slime.algorithms.log_probs takes at a time on a GPU
LOG_PROB_BUFFERS = 3  # of a chunk at a time: the scaled logits, the selected rows, their probabilities
DTYPE_BYTES = {"fp32": 4, "float32": 4, "fp16": 2, "float16": 2, "bf16": 2, "bfloat16": 2, "fp8": 1, "uint8": 1}


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes on a GPU of pipeline stage ``stage``, for micro-batches of ``tokens`` tokens per GPU.

    ``activations`` are kept from forward to backward; ``recomputed`` and ``logits`` come on top of them, one after
    the other; ``transfer`` are the buckets of a weight update, between the steps, when an ``offloaded`` trainer
    has only its parameters; before that its fp32 ``masters`` are onloaded for a moment, of which those are made again.
    ``host`` is in the host's memory: copies of weights, an offloaded trainer, and an offloaded
    optimizer.
    """

    stage: int
    tokens: int
    in_flight: float
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    recomputed: int
    transfer: int
    host: int
    offloaded: bool = False
    masters: int = 0
    context: int = CONTEXT

    @property
    def static(self) -> int:
        """The memory that is in use from the start to the end."""
        return self.parameters + self.gradients + self.optimizer + self.context

    @property
    def step(self) -> int:
        """The peak of a training step."""
        return self.static + self.activations + max(self.logits, self.recomputed)

    @property
    def sending(self) -> int:
        """The memory that is in use while weights are sent to the engines."""
        if self.offloaded:
            return self.parameters + self.context + max(self.masters, self.transfer)
        return self.static + self.transfer

    @property
    def total(self) -> int:
        """The most at any time."""
        return max(self.step, self.sending)


def trainer_memory(args: Args, size: ModelSize) -> tuple[TrainerMemory, ...]:
    """Return the memory of a GPU of every pipeline stage."""
    return tuple(_stage_memory(args, size, rank) for rank in size.ranks)


def element_size(args: Args) -> int:
    """Return the bytes of a parameter on GPUs: bf16, unless ``--fp16`` or ``--fp32`` is given."""
    return 4 if args.fp32 else 2


def longest_sample(args: Args) -> int | None:
    """Return the tokens of the longest sample that the flags allow, None when they do not limit it."""
    context = args.rollout_max_context_len
    response = args.rollout_max_response_len
    if context is not None:
        return int(context)
    return None if response is None else int(response) + int(args.rollout_max_prompt_len or 0)


def micro_batch_tokens(args: Args, parallel: Parallel) -> int:
    """Return the tokens of the longest micro-batch on one rank, padded as the trainer pads them.

    With dynamic batches that is ``--max-tokens-per-gpu``, or the longest sample where that is longer; otherwise
    ``--micro-batch-size`` samples of the greatest length.
    """
    longest = longest_sample(args)
    if args.use_dynamic_batch_size and args.max_tokens_per_gpu:
        total = max(int(args.max_tokens_per_gpu) * parallel.cp, longest or 0)
    else:
        total = int(args.micro_batch_size or 1) * (longest or int(args.seq_length or 4096))
    alignment = parallel.tp * int(args.data_pad_size_multiplier or 128)
    return -(-total // (parallel.cp * alignment)) * alignment


def _stage_memory(args: Args, size: ModelSize, rank: RankSize) -> TrainerMemory:
    element, parallel = element_size(args), size.parallel
    tokens = micro_batch_tokens(args, parallel)
    kept = kept_of(args, element)
    activations, recomputed = _activations(args, size, rank, tokens, kept)
    activations += element * _embedding_copy(args, size, rank)
    of_images, one_layer = _tower(args, size, rank, tokens, kept)
    activations, recomputed = activations + of_images, max(recomputed, one_layer)
    trained, frozen = _trained(args, size, rank)
    parameters = element * (trained.dense_buffer + trained.expert_buffer + frozen + rank.tower)
    if args.num_rollout == 0:
        return _weights_alone(args, rank.stage, parameters, _transfer(args, size, element))
    optimizer = int(state_bytes(args) * _shard(args, trained, parallel))
    # With adapters the reference is the model without them.
    with_reference = needs_reference(args) and not args.lora_rank
    old = (2 if args.update_weights_interval == 1 else 1) * bool(args.keep_old_actor)
    others = with_reference + needs_teacher(args) + old
    copies = others + bool(others)  # the actor's own, while another plays
    # 16-bit parameters are written again from the optimizer's fp32 copy, unless it is the precision-aware optimizer's.
    rebuilt = element < 4 and not args.use_precision_aware_optimizer
    offloaded_state = optimizer + (element * (frozen + rank.tower) if rebuilt else parameters)
    optimizer_on_host = int(_shard(args, trained, parallel) * _state_size(args) * _offloaded(args))
    copied = trained.total + (frozen if needs_teacher(args) else 0)  # another policy differs in what is trained alone
    return TrainerMemory(
        stage=rank.stage,
        tokens=tokens,
        in_flight=sum(_in_flight(args, parallel, rank.stage)) / parallel.vpp,
        parameters=parameters,
        gradients=gradient_size(args) * (trained.dense_buffer + trained.expert_buffer),
        optimizer=optimizer,
        activations=activations,
        logits=_logits(args, size, tokens, element) if any(chunk.output for chunk in rank.chunks) else 0,
        recomputed=recomputed,
        transfer=_transfer(args, size, element),
        host=element * copied * copies + optimizer_on_host + (offloaded_state if args.offload_train else 0),
        offloaded=bool(args.offload_train),
        masters=int(4 * (1 - _offloaded(args)) * _shard(args, trained, parallel)) if rebuilt else 0,
    )


def _weights_alone(args: Args, stage: int, parameters: int, transfer: int) -> TrainerMemory:
    """Return the memory of a trainer whose weights are evaluated and not trained."""
    return TrainerMemory(
        stage=stage,
        tokens=0,
        in_flight=0.0,
        parameters=parameters,
        gradients=0,
        optimizer=0,
        activations=0,
        logits=0,
        recomputed=0,
        transfer=transfer,
        host=parameters if args.offload_train else 0,
        offloaded=bool(args.offload_train),
    )


def _trained(args: Args, size: ModelSize, rank: RankSize) -> tuple[RankSize, int]:
    """Return the sizes of what is trained, and how many parameters are not: those below the adapters."""
    if not args.lora_rank:
        return rank, 0
    dense, expert = adapter_parameters(args, size.shape, rank, size.parallel)
    return replace(rank, dense=dense, expert=expert, dense_buffer=dense, expert_buffer=expert), rank.total


def gradient_size(args: Args) -> int:
    """Return the bytes of a gradient: fp32, but for fp16 and ``--grad-reduce-in-bf16``."""
    asked = args.accumulate_allreduce_grads_in_fp32
    bf16 = not args.fp16 and not args.grad_reduce_in_bf16
    return 4 if asked or bf16 else element_size(args)


def state_bytes(args: Args) -> float:
    """Return the bytes of optimizer state per parameter on the GPU."""
    return _state_size(args) * (1 - _offloaded(args))


def _offloaded(args: Args) -> float:
    """The part of the optimizer state that is in the host's memory."""
    if not args.optimizer_cpu_offload:
        return 0.0
    return float(args.optimizer_offload_fraction or 0)


def _state_size(args: Args) -> float:
    """Bytes of optimizer state per parameter, on the GPU or the host.

    Adam keeps two moments in fp32 and, for 16-bit parameters, an fp32 copy of them: K = 12 of Rajbhandari et al. 2020,
    "ZeRO" (https://arxiv.org/abs/1910.02054), of which the distributed optimizer leaves each rank its share. The
    precision-aware optimizer keeps of the copy only the 16 bits that the bf16 parameter lacks.
    """
    copy = 0.0 if element_size(args) == 4 else 4.0
    aware = bool(args.use_precision_aware_optimizer)
    if aware and copy:
        main = _dtype_bytes(args, "main_params_dtype")
        copy = main if main < 4 else (2.0 if args.store_param_remainders else 4.0)
    if args.use_stateless_adam:
        moments = 0.0
    elif (args.optimizer or "adam") == "adam":
        sizes = ("exp_avg_dtype", "exp_avg_sq_dtype")
        moments = sum(_dtype_bytes(args, name) if aware else 4.0 for name in sizes)
    else:
        moments = 4.0  # momentum
    return copy + moments


def _dtype_bytes(args: Args, name: str) -> float:
    value = str(getattr(args, name, None) or "fp32").removeprefix("torch.")
    return float(DTYPE_BYTES.get(value, 4))


def _shard(args: Args, rank: RankSize, parallel: Parallel) -> int:
    """Parameters whose optimizer state one rank has."""
    sharded = args.use_distributed_optimizer is not False
    instances = int(args.num_distributed_optimizer_instances or 1)
    dense = max(1, parallel.dense_ranks // instances) if sharded else 1
    expert = max(1, parallel.expert_ranks // instances) if sharded else 1
    return -(-rank.dense_buffer // dense) + -(-rank.expert_buffer // expert)


def _embedding_copy(args: Args, size: ModelSize, rank: RankSize) -> int:
    """Return the parameters of the embedding that the last stage copies for its MTP layers."""
    predicts = any(chunk.mtp for chunk in rank.chunks) and args.enable_mtp_training
    if not predicts or not size.shape.untied or size.parallel.pp == 1:
        return 0
    return size.shape.vocab // size.parallel.tp * size.shape.hidden


def _in_flight(args: Args, parallel: Parallel, stage: int) -> list[int]:
    """Return for every chunk of the stage how many micro-batches it holds at the most, as Megatron schedules them.

    One forward, one backward: stage p of n holds n - p micro-batches, the first the most (Narayanan et al. 2021,
    https://arxiv.org/abs/2104.04473). Interleaved, 2 (n - p - 1) + (v - 1) g + 1 forwards of a chunk, taken in turns
    of g micro-batches.
    """
    n, v = parallel.pp, parallel.vpp
    most = _micro_batches(args, parallel)
    if v == 1:
        return [n - stage if most is None else min(n - stage, most)]
    group = int(args.microbatch_group_size_per_vp_stage or n)
    forwards = 2 * (n - stage - 1) + (v - 1) * group + 1
    held = [0] * v
    for i in range(forwards if most is None else min(forwards, most * v)):
        held[i // group % v] += 1
    return held


def _micro_batches(args: Args, parallel: Parallel) -> int | None:
    """Return the micro-batches of a step per rank; None where their number depends on the lengths."""
    if args.use_dynamic_batch_size or not args.global_batch_size:
        return None
    return max(1, int(args.global_batch_size) // (parallel.dp * int(args.micro_batch_size or 1)))


def _activations(args: Args, size: ModelSize, rank: RankSize, tokens: int, kept: Kept) -> tuple[int, int]:
    """Return (bytes kept from forward to backward, bytes on top while one layer or block runs backward)."""
    held, on_top = 0.0, 0.0
    for chunk, count in zip(rank.chunks, _in_flight(args, size.parallel, rank.stage), strict=True):
        stored, block = _chunk_bytes(size, chunk, kept)
        held += count * stored * tokens
        on_top = max(on_top, block * tokens)
    return int(held), int(on_top)


def image_tokens(args: Args, tokens: int) -> int:
    """Return how many of ``tokens`` are counted as those of images: the share of prompts in the longest sample.

    All of them where no flag says how long prompts are.
    """
    longest, prompt = longest_sample(args), args.rollout_max_prompt_len
    return min(tokens, -(-tokens * int(prompt) // longest)) if longest and prompt else tokens


def _tower(args: Args, size: ModelSize, rank: RankSize, tokens: int, kept: Kept) -> tuple[int, int]:
    """Return the bytes that a vision tower keeps, and those of one of its layers and the pixels on top of them.

    It computes the images of the whole micro-batch, of all context-parallel ranks. A frozen one keeps the features that
    enter decoder layers.
    """
    tower = size.shape.tower
    if tower is None or not any(chunk.embedding for chunk in rank.chunks):
        return 0, 0
    images = image_tokens(args, tokens * size.parallel.cp)
    patches = images * tower.merge**2
    held = tower.deepstack * images * kept.element * tower.out
    if args.train_vision_tower:
        held += patches * tower.kept_bytes(kept.element, recomputed=kept.granularity == "full")
    in_flight = _in_flight(args, size.parallel, rank.stage)[0]
    return held * in_flight, patches * (FP32 * tower.patch_numbers + tower.layer_bytes(kept.element))


def _chunk_bytes(size: ModelSize, chunk: Chunk, kept: Kept) -> tuple[float, float]:
    """Return bytes per token: (kept by a chunk, more of them while a layer or a recomputed block runs backward)."""
    shape, parallel = size.shape, size.parallel
    pieces = {kind: layer_bytes(shape, kind, parallel, kept) for kind in set(shape.kinds)}
    kinds = [shape.kinds[i] for i in chunk.layers] + [shape.kinds[-1]] * chunk.mtp
    whole = {kind: sum(piece.values()) for kind, piece in pieces.items()}
    # The gradients of a layer's activations, and the sequence that sequence parallelism gathers.
    working = max((gradient_bytes(pieces[kind]) for kind in set(kinds)), default=0.0)
    working += kept.element * shape.hidden if parallel.sp > 1 else 0
    ends = 2 * kept.element * shape.hidden / parallel.sp if chunk.output else 0.0
    if kept.granularity != "full":
        stored = {kind: spared(piece, kept) for kind, piece in pieces.items()}
        return ends + sum(stored[kind] for kind in kinds), working
    full = [whole[kind] for kind in kinds]
    one_input = kept.element * shape.hidden / (parallel.tp if kept.distributed else parallel.sp)
    if kept.method == "block":
        block = min(kept.block, len(full))
        again = max(0.0, max(full[:block], default=0.0) - one_input)  # the input is in memory already
        return ends + block * one_input + sum(full[block:]), again + working
    again = max(0.0, sum(sorted(full, reverse=True)[: kept.block]) - one_input)
    return ends + -(-len(full) // kept.block) * one_input, again + working


def _logits(args: Args, size: ModelSize, tokens: int, element: int) -> int:
    """Return the bytes of the last stage's logits, with their gradient, and a chunk of log-probs at a time in fp32.

    They are divided over the tensor-parallel ranks, and stay in the parameters' dtype with their gradient in the same
    memory, unless something else reads them: then they are fp32, and the gradient too. Every layer of multi-token
    prediction keeps its own logits.
    """
    columns = size.shape.vocab // size.parallel.tp
    rows = int(args.log_probs_chunk_size or -1)
    chunk = min(tokens, rows if rows > 0 else tokens, max(1, LOG_PROB_CHUNK // columns))
    per_logit = element if overwrites_logits(args) else 2 * FP32
    own = element * size.shape.mtp * tokens
    return columns * (per_logit * tokens + own + FP32 * LOG_PROB_BUFFERS * chunk)


def overwrites_logits(args: Args) -> bool:
    """Return whether the gradient takes the place of the logits, both in the parameters' dtype.

    A custom loss and top-p replay may need both, and get them in fp32.
    """
    own_loss = args.loss_type != "custom_loss"
    return own_loss and args.rollout_top_p == 1.0


def _transfer(args: Args, size: ModelSize, element: int) -> int:
    """Return the bytes of a weight update: a bucket of whole tensors, and the flat copy that is sent."""
    if args.debug_train_only:
        return 0
    bucket = int(args.update_weight_buffer_size or 0)
    largest = element * size.shape.vocab * size.shape.hidden  # a tensor above the limit travels alone
    return 2 * max(bucket, largest)


def memory_by_part(memory: TrainerMemory) -> Mapping[str, int]:
    """Return the rows of the table: name -> bytes. They add up to the peak of a training step."""
    return {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations,
        "logits" if memory.logits >= memory.recomputed else "one layer's backward": max(
            memory.logits, memory.recomputed
        ),
        "CUDA and NCCL": memory.context,
    }


FP32 = 4


@dataclass(frozen=True)
class Kept:
    """Storage of activations. ``element`` is the size of one in bytes; ``modules`` are recomputed ("selective")."""

    element: int = 2
    granularity: str | None = None
    method: str | None = None
    block: int = 1
    modules: frozenset[str] = frozenset()
    distributed: bool = False
    fused_activation: bool = True
    fused_rope: bool = True
    dropout: bool = False


def kept_of(args: Args, element: int) -> Kept:
    """Return how ``args`` keep activations."""
    selective = args.recompute_granularity == "selective"
    modules = set(args.recompute_modules or ["core_attn"]) if selective else set()
    if args.moe_layer_recompute:
        modules.add("moe")
    return Kept(
        element=element,
        granularity=args.recompute_granularity,
        method=args.recompute_method,
        block=int(args.recompute_num_layers or 1),
        modules=frozenset(modules),
        distributed=bool(args.distribute_saved_activations),
        fused_activation=bool(args.bias_swiglu_fusion),
        fused_rope=bool(args.apply_rope_fusion),
        dropout=(args.hidden_dropout or 0) > 0,
    )


def layer_bytes(shape: ModelShape, kind: LayerKind, parallel: Parallel, kept: Kept) -> dict[str, float]:
    """Return what one layer keeps per token, by what recomputing can spare, before anything is spared.

    The accounting of Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models"
    (https://arxiv.org/abs/2205.05198), section 4, with today's layers: flash attention keeps no score matrix, only
    queries, keys, values, its output and a log-sum-exp per head; a fused gated unit keeps its input, of twice the
    width; there is no dropout; what is outside of the tensor-parallel regions is divided under sequence parallelism
    only. The values are a view of the projection's output, so that all of it stays beside the rotated queries and
    keys: 4 bytes per token and hidden unit more than the paper's 34, of which its dropout masks (2) are left out.
    """
    e, h, sp = kept.element, shape.hidden, parallel.sp
    found = {"inputs": 2 * e * h / sp, "norms": 2 * e * h / sp}
    if shape.post_attention_norm or shape.post_mlp_norm:
        found["inputs"] += e * h / sp * (shape.post_attention_norm + shape.post_mlp_norm)
    if kept.dropout:
        found["inputs"] += 2 * h / sp  # a mask of one byte after attention and after the MLP
    if kind.linear:
        assert shape.linear is not None
        found |= _linear_attention(shape.linear, parallel.tp, e)
    elif shape.latent is not None:
        found |= _latent_attention(shape.latent, shape.heads, parallel, e)
    else:
        found |= _attention(shape, kind, parallel.tp, e)
    if not kept.fused_rope and not kind.linear:
        found["softmax"] += 4 * e * (shape.latent.rope_dim if shape.latent else shape.heads_of(kind)[1])  # angles
    if kind.moe:
        assert shape.experts is not None
        return found | _experts(shape, shape.experts, parallel, kept)
    return found | {"mlp": _mlp(shape, shape.ffn, kept) / parallel.tp}


def spared(found: Mapping[str, float], kept: Kept) -> float:
    """Return the bytes per token that a layer keeps when ``kept.modules`` are recomputed."""
    names = set(found)
    without = {
        "core_attn": {"softmax"},  # queries, keys and values are its inputs and stay
        "layernorm": {"norms"},
        "mla_up_proj": {"latent_qkv"},
        "mlp": {"mlp"},
        "moe": {"router", "expert_inputs", "expert_hidden", "expert_outputs", "shared"},
        "moe_act": {"expert_outputs"},
        "shared_experts": {"shared"},
    }
    for module in kept.modules:
        names -= without.get(module, set())
    return sum(found[name] for name in names)


MLP_PARTS = frozenset({"mlp", "router", "expert_inputs", "expert_hidden", "expert_outputs", "shared"})


def gradient_bytes(found: Mapping[str, float]) -> float:
    """Return the bytes per token of the gradients that are in memory at once in a layer's backward pass.

    Those of the MLP's inner activations or those of the attention's, whichever are more.
    """
    mlp = sum(size for name, size in found.items() if name in MLP_PARTS)
    return max(mlp, sum(found.values()) - mlp - found["inputs"] - found["norms"])


def _attention(shape: ModelShape, kind: LayerKind, tp: int, e: int) -> dict[str, float]:
    groups, dim, projections = shape.heads_of(kind)
    query, key = shape.heads * dim, max(groups, tp) * dim
    projected, rotated = query + projections * key, query + key
    found = {"qkv": e * (projected + rotated) / tp, "softmax": FP32 * shape.heads / tp, "context": e * query / tp}
    if shape.qk_norm and tp < groups < shape.heads:
        found["qk_norm"] = e * query / tp  # queries of several groups are copied out of the projection's output
    if shape.output_gate:
        found["gate"] = 3 * e * query / tp  # the gate in the projection's output, its copy, and the gated output
    return found


def _latent_attention(latent: Latent, heads: int, parallel: Parallel, e: int) -> dict[str, float]:
    compressed = 2 * (latent.q_rank or 0) + 2 * latent.kv_rank + latent.rope_dim
    qkv = heads * (2 * latent.query_dim + latent.v_dim)
    return {
        "latents": e * compressed / parallel.sp,
        "latent_qkv": e * qkv / parallel.tp,
        "softmax": FP32 * heads / parallel.tp,
        "context": e * heads * latent.v_dim / parallel.tp,
    }


LINEAR_CHUNK = 64  # tokens between two states that the kernels of flash-linear-attention keep


def _linear_attention(linear: LinearAttention, tp: int, e: int) -> dict[str, float]:
    convolved = 2 * linear.keys + linear.values
    states = linear.value_heads * linear.key_dim * linear.value_dim / LINEAR_CHUNK
    return {
        "qkv": 2 * e * convolved / tp,  # before and after the convolution
        "softmax": e * states / tp,
        "gate": e * linear.values / tp,
        "context": 2 * e * linear.values / tp,
    }


def _mlp(shape: ModelShape, ffn: int, kept: Kept) -> float:
    """Bytes per token of the input of the activation function and of its output."""
    return kept.element * ffn * ((2 if shape.gated else 1) + 1 + _unfused(shape, kept))


def _unfused(shape: ModelShape, kept: Kept) -> int:
    """Without fusion a gated unit keeps its activated half and its shifted linear half too."""
    return 2 if shape.gated and not (kept.fused_activation and shape.fused_gate) else 0


def _experts(shape: ModelShape, experts: Experts, parallel: Parallel, kept: Kept) -> dict[str, float]:
    """Bytes per token of a rank whose experts get their even share: ``top_k`` copies of every token."""
    e, copies = kept.element, experts.top_k * parallel.etp / parallel.sp
    width, unfused = experts.ffn / parallel.etp, _unfused(shape, kept)
    found = {
        "router": (5 * experts.number + 24 * experts.top_k) / parallel.sp,  # scores and mask; choices and weights
        "expert_inputs": copies * e * (experts.latent or shape.hidden),
        "expert_hidden": copies * e * width * (2 if shape.gated else 1),
        "expert_outputs": copies * e * width * (1 + unfused + (unfused > 0)),  # weighted by the router
    }
    if experts.shared:
        found["shared"] = _mlp(shape, experts.shared, kept) / parallel.tp
    return found


class _Projection(NamedTuple):
    """``cut``: how tensor parallelism cuts it. ``owners``: routed experts that have one of their own, else 1."""

    name: str
    inputs: int
    outputs: int
    cut: Literal["rows", "columns", "none"]
    owners: int = 1
    expert: bool = False


def adapter_parameters(args: Args, shape: ModelShape, rank: RankSize, parallel: Parallel) -> tuple[int, int]:
    """Return ``(dense, expert)``: the parameters of adapters on one rank, those of routed experts apart.

    Projections by the names that most families have; a family that stores gate and up projection
    as one has a few less.
    """
    found = {False: 0, True: 0}
    for chunk in rank.chunks:
        for layer in chunk.layers:
            for projection in _projections(shape, shape.kinds[layer]):
                if args.lora_target_modules == ["all-linear"] or projection.name in args.lora_target_modules:
                    found[projection.expert] += _adapter_on_rank(projection, args.lora_rank, parallel)
    return found[False], found[True]


def _adapter_on_rank(projection: _Projection, rank: int, parallel: Parallel) -> int:
    """A is ``[rank, inputs]`` and B ``[outputs, rank]``; one of them is cut, or none."""
    ranks = parallel.etp if projection.expert else parallel.tp
    inputs = projection.inputs // ranks if projection.cut == "columns" else projection.inputs
    outputs = projection.outputs // ranks if projection.cut == "rows" else projection.outputs
    count = projection.owners // parallel.ep if projection.expert else 1
    return rank * (inputs + outputs) * count


def _projections(shape: ModelShape, kind: LayerKind) -> Iterator[_Projection]:
    if kind.linear:
        pass  # its projections have no adapters
    elif shape.latent is not None:
        yield from _latent_projections(shape)
    else:
        groups, dim, projections = shape.heads_of(kind)
        query, key = shape.heads * dim, groups * dim
        yield _Projection("q_proj", shape.hidden, query * (2 if shape.output_gate else 1), "rows")
        yield from (_Projection(name, shape.hidden, key, "rows") for name in ("k_proj", "v_proj")[:projections])
        yield _Projection("o_proj", query, shape.hidden, "columns")
    if not kind.moe:
        yield from _mlp_projections(shape, shape.ffn)
        return
    experts = shape.experts
    assert experts is not None
    yield from (p._replace(owners=experts.number, expert=True) for p in _mlp_projections(shape, experts.ffn))
    if experts.shared:
        yield from _mlp_projections(shape, experts.shared)


def _latent_projections(shape: ModelShape) -> Iterator[_Projection]:
    latent, hidden = shape.latent, shape.hidden
    assert latent is not None
    query = shape.heads * latent.query_dim
    if latent.q_rank is None:
        yield _Projection("q_proj", hidden, query, "rows")
    else:
        yield _Projection("q_a_proj", hidden, latent.q_rank, "none")
        yield _Projection("q_b_proj", latent.q_rank, query, "rows")
    yield _Projection("kv_a_proj_with_mqa", hidden, latent.kv_rank + latent.rope_dim, "none")
    yield _Projection("kv_b_proj", latent.kv_rank, shape.heads * (latent.qk_dim + latent.v_dim), "rows")
    yield _Projection("o_proj", shape.heads * latent.v_dim, hidden, "columns")


def _mlp_projections(shape: ModelShape, ffn: int) -> Iterator[_Projection]:
    yield _Projection("gate_proj", shape.hidden, ffn, "rows")
    yield _Projection("up_proj", shape.hidden, ffn, "rows")
    yield _Projection("down_proj", ffn, shape.hidden, "columns")
