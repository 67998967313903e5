"""Save and load trainer state as Megatron ``torch_dist`` checkpoints that any other parallel layout can read.

The other formats of ``--ckpt-format`` are in ``formats``; a checkpoint is read in the one that it has.

What is saved: model, optimizer (``fully_reshardable``: fp32 parameters and Adam moments in model coordinates),
learning-rate schedule, random states. The iteration of a checkpoint is the rollout id after which it was taken.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from slime.arguments.args import Args
from slime.backends.megatron_utils import import_megatron
from slime.backends.megatron_utils.checkpoints import directory as checkpoint_dir
from slime.backends.megatron_utils.checkpoints.digests import HAS_DIGESTS, WAY_BACK, check_files, write_digests
from slime.backends.megatron_utils.checkpoints.directory import TORCH_DIST
from slime.backends.megatron_utils.checkpoints.formats import (
    DAMAGE,
    load_optimizer,
    read_common,
    read_model,
    writer_for,
)
from slime.backends.megatron_utils.checkpoints.lora_tensors import base_part, check_described, trained_part
from slime.backends.megatron_utils.checkpoints.pickles import reading_plain_values
from slime.backends.megatron_utils.checkpoints.random_states import (
    copy_number,
    layout,
    own_rng_state,
    restore_rng,
    rng_state,
    saved_layout,
)
from slime.backends.megatron_utils.checkpoints.torch_dist import lacks_tower, rename_to_stored, take_unstored
from slime.backends.megatron_utils.state.offload import torch_optimizers
from slime.backends.megatron_utils.state.optimizer import (
    check_optimizers,
    choose_adam_kernel,
    complete_steps,
    for_chain,
    with_length_of_run,
)
from slime.backends.megatron_utils.state.parallel import (
    all_gather_objects,
    data_parallel,
    gather_from_world,
    unwrap,
)
from slime.utils import digests
from slime.utils.distributed_utils import control_group

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
    from megatron.core.optimizer.optimizer import ChainedOptimizer
    from megatron.core.transformer.module import MegatronModule


def in_process_strategy(*, parallel_over_dp: bool) -> Any:
    """Return Megatron's ``torch_dist`` save strategy, writing from this process.

    With ``parallel_over_dp`` the DP x CP ranks share the writing of replicated tensors. Megatron's own writer forks one
    process per file and starts a ``multiprocessing.Manager``, which imports the main module again: seconds per save,
    unsafe with Ray's threads and CUDA, and a process left over when the trainer dies. Here the same writer functions
    run in the calling thread. They spend their time in system calls without the GIL.
    """
    import_megatron()
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    # The queue through which the writer returns results; set before Megatron would start a Manager process for it.
    filesystem_async._results_queue = queue.Queue()

    class InProcessStrategy(TorchDistSaveShardedStrategy):
        def _get_save_and_finalize_callbacks(self, writer: FileSystemWriterAsync, save_state_dict_ret: object) -> Any:
            request = super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret)
            if request.async_fn is None:
                return request
            transforms, _use_msc = request.async_fn.args
            return request._replace(async_fn=lambda *args: _write(filesystem_async, transforms, *args))

    strategy = InProcessStrategy("torch_dist", 1)
    ranks = data_parallel(with_context_parallel=True)
    if parallel_over_dp and ranks.size > 1:
        return FullyParallelSaveStrategyWrapper(strategy, ranks.group)
    return strategy


def _write(
    filesystem_async: ModuleType, transforms: list[Any], rank: int, buckets: list[Any], results: queue.Queue
) -> None:
    """Write ``buckets`` one by one and put {bucket number: results} into ``results``. Raises what writing raised."""
    written: dict[int, Any] = {}
    for number, bucket in enumerate(buckets):
        answer: queue.Queue = queue.Queue()
        ticket: queue.Queue = queue.Queue()
        ticket.put(number)
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(
            transforms, number, bucket, answer, ticket, use_fsync=True
        )
        _, outcome = answer.get_nowait()
        if isinstance(outcome, Exception):
            raise outcome
        written[number] = outcome
    results.put(written)


logger = logging.getLogger(__name__)


# fully_reshardable: optimizer state is stored by parameter, not by bucket, so that DP, TP and PP may all change.
_CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}


ADAPTER_DIRECTORY = "adapter"
"""Within a checkpoint of adapters: the same in PEFT's form."""


@dataclass
class TrainerState:
    """The objects a checkpoint holds. ``optimizer`` and ``scheduler`` are None for weights only.

    ``adapters``: what is said about adapters (``--lora-rank``), which are then all that it holds of the model.
    ``base_only``: the model without its adapters is meant.
    """

    model: Sequence[torch.nn.Module]
    optimizer: Any = None
    scheduler: Any | None = None
    adapters: dict[str, Any] | None = None
    base_only: bool = False


@reading_plain_values
def load_checkpoint(
    args: Args,
    root: str | Path,
    state: TrainerState,
    *,
    step: int | None = None,
    weights_only: bool = False,
    without: str | None = None,
) -> int | None:
    """Fill ``state`` from the checkpoint under ``root``; return its iteration (None: a ``release`` checkpoint).

    ``--no-load-optim``, ``--no-load-rng`` and ``--finetune`` (neither, and counting starts afresh: returns None) are
    obeyed; ``weights_only`` reads just the model, without its module ``without`` when that is given. Optimizer state
    may come from any layout; random states are restored only under the same one. Raises ValueError / FileNotFoundError
    for an incomplete, missing or other checkpoint.
    """
    import_megatron()
    from megatron.core import dist_checkpointing

    directory, iteration = checkpoint_dir.find_checkpoint(root, step)
    form = checkpoint_dir.stored_format(directory)
    compared = check_files(directory)
    finetune = weights_only or args.finetune
    goes_on = state.optimizer is not None and not finetune and not args.no_load_optim
    with _naming_damage(directory):
        if form == TORCH_DIST:
            common = dist_checkpointing.load_common_state_dict(str(directory))
        else:
            common = read_common(directory, form, _named_chunks(state.model), with_optimizer=goes_on)
    if not compared:
        _check_never_had_digests(directory, common)
    check_described(common.get("slime_lora"), state.adapters, directory)
    with_optimizer = goes_on and "optimizer" in common and not _is_stateless(args)
    if goes_on and not with_optimizer and not _is_stateless(args):
        raise ValueError(
            f"checkpoint {directory} has no optimizer state (it was saved with --no-save-optim). "
            "Continue without it with --no-load-optim, or take its weights as a fresh start with --finetune"
        )
    if with_optimizer:
        check_optimizers(common["optimizer"], state.optimizer, directory)
    with_rng = not finetune and not args.no_load_rng and saved_layout(common) == layout()
    if form == TORCH_DIST:
        loaded = _load_sharded(
            args, state, common, directory, with_optimizer=with_optimizer, with_rng=with_rng, without=without
        )
    else:
        loaded = common
        with _naming_damage(directory):
            for name, chunk in _named_chunks(state.model):
                wanted = _part_in_plain(state, chunk, without)
                loaded[name] = read_model(directory, form, common, name, wanted)
    for name, chunk in _named_chunks(state.model):
        whole = form == TORCH_DIST and without is None and state.adapters is None and not state.base_only
        chunk.load_state_dict(loaded[name], strict=whole)
    if with_optimizer:
        _restore_optimizer(args, state.optimizer, form, loaded, directory)
    elif state.optimizer is not None:
        state.optimizer.reload_model_params()
    if goes_on:
        _load_scheduler(args, state.scheduler, loaded, directory)
    if with_rng:
        restore_rng(loaded["rng_state"] if form == TORCH_DIST else loaded["rng_state"][copy_number()])
    elif not finetune and not args.no_load_rng:
        why = "it has none (--no-save-rng)" if saved_layout(common) is None else "saved under another parallel layout"
        logger.info("random states of %s are not restored: %s", directory, why)
    logger.info("loaded %s (optimizer: %s, random states: %s)", directory, with_optimizer, with_rng)
    return None if finetune else iteration


def _check_never_had_digests(directory: Path, common: dict[str, Any]) -> None:
    if common.get(HAS_DIGESTS):
        raise ValueError(f"checkpoint {directory} has lost its {digests.FILE}. {WAY_BACK}")
    logger.info("%s has no digests (slime <= 0.3.1 and Megatron-LM write none): it is not compared", directory)


def _restore_optimizer(
    args: Args, optimizer: ChainedOptimizer, form: str, loaded: dict[str, Any], directory: Path
) -> None:
    """Fill ``optimizer`` from what was loaded; in formats other than torch_dist each rank reads its own file here."""
    rates = [dict(group) for group in _groups(optimizer)]
    if form == TORCH_DIST:
        optimizer.load_state_dict(for_chain(loaded["optimizer"], optimizer))
    else:
        with _naming_damage(directory):
            load_optimizer(directory, form, loaded, optimizer)
    choose_adam_kernel(optimizer)
    if not args.use_checkpoint_opt_param_scheduler:
        _restore_limits(optimizer, rates)


def _load_sharded(
    args: Args,
    state: TrainerState,
    common: dict[str, Any],
    directory: Path,
    *,
    with_optimizer: bool,
    with_rng: bool,
    without: str | None,
) -> dict[str, Any]:
    """Return the state of a ``torch_dist`` checkpoint, of which ``common`` is read already, for this layout."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.api import CheckpointException

    content = dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or dict(_CONTENT)
    request = _sharded_state(state, content, with_optimizer=with_optimizer, with_rng=with_rng, is_loading=True)
    for name, _ in _named_chunks(state.model) if without is not None else ():
        request[name] = {key: part for key, part in request[name].items() if not key.startswith(f"{without}.")}
    try:
        with _naming_damage(directory):
            stored = FileSystemReader(directory).read_metadata().state_dict_metadata.keys()
            without_tower = lacks_tower(state.model, stored, directory, with_optimizer=with_optimizer)
            if without_tower:
                _take_tower_of_hf(args, state.model, directory)
            renamed = rename_to_stored(request, stored)
            own = {
                name: take_unstored(request[name], stored, tower=without_tower)
                for name, _ in _named_chunks(state.model)
            }
            loaded: dict[str, Any] = dist_checkpointing.load(request, str(directory))
            for name, states in own.items():
                loaded[name].update(states)
    except (CheckpointingException, CheckpointException) as e:
        if with_optimizer and content.get("non_homogeneous_layers", False) != _freezes_some(state.model):
            raise ValueError(
                f"the optimizer state in {directory} is of other parameters than those trained now: look at "
                "--only-train-params-name-list and --freeze-params-name-list, or take the weights alone with "
                "--no-load-optim"
            ) from e
        raise
    if renamed:
        logger.info(
            "%s has the names of other layers (TransformerEngine's, or Megatron's own): %d", directory, len(renamed)
        )
    return loaded


def _take_tower_of_hf(args: Args, model: Sequence[torch.nn.Module], directory: Path) -> None:
    loads = (getattr(unwrap(chunk), "load_tower", None) for chunk in model)
    for load in loads:
        if load is not None and load(args):
            logger.info("%s has no vision tower: it is that of %s", directory, args.hf_checkpoint)


@contextlib.contextmanager
def _naming_damage(directory: Path) -> Iterator[None]:
    """Name the checkpoint in what reading it raises. Raises ValueError for files that are damaged or cut off."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except DAMAGE as e:
        raise ValueError(_damaged(directory, e)) from e
    except CheckpointException as e:
        causes = [failure[0] for failure in e.failures.values()]
        if any(isinstance(cause, DAMAGE) and not _is_of_planning(cause) for cause in causes):
            raise ValueError(_damaged(directory, causes[0])) from e
        e.add_note(f"while reading the checkpoint {directory}")
        raise


def _is_of_planning(cause: BaseException) -> bool:
    """Return True if the request does not fit the checkpoint: other shapes or names, not other bytes."""
    return any(word in str(cause) for word in ("Missing key", "Size mismatch", "size mismatch", "shape"))


def _damaged(directory: Path, cause: BaseException) -> str:
    sizes = ", ".join(
        f"{path.relative_to(directory)} {path.stat().st_size}"
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    )
    return (
        f"checkpoint {directory} cannot be read, a file of it is damaged or cut off: {type(cause).__name__}: "
        f"{str(cause)[:300]} (files and bytes: {sizes[:1000]}). {WAY_BACK}"
    )


class CheckpointSaver:
    """Writes checkpoints under ``--save``, in the foreground or (``--async-save``) from a thread.

    All methods are collective: every rank calls them in the same order.
    """

    def __init__(self, args: Args) -> None:
        self._args = args
        self._pending: _PendingSave | None = None

    def save(self, iteration: int, state: TrainerState, *, force_sync: bool = False) -> None:
        """Save ``state`` as ``iteration``; when this returns (not ``--async-save``) it is what a restart would load."""
        self.finish()
        assert self._args.save is not None, "nothing is saved without --save"
        root = Path(self._args.save)
        with_optimizer = not self._args.no_save_optim
        with_rng = not self._args.no_save_rng
        common: dict[str, Any] = {
            "checkpoint_version": 3.0,
            "iteration": iteration,
            "slime_layout": layout() if with_rng else None,
            HAS_DIGESTS: True,
        }
        if state.adapters is not None:
            common["slime_lora"] = state.adapters
        if state.scheduler is not None and (with_optimizer or _is_stateless(self._args)):
            common["opt_param_scheduler"] = state.scheduler.state_dict()
        if dist.get_rank() == 0:
            checkpoint_dir.begin(root, iteration)
        dist.barrier(group=control_group())
        asynchronous = self._args.async_save and not force_sync
        directory = Path(str(checkpoint_dir.iteration_dir(root, iteration)) + ".writing")
        _check_space(state, root)
        finalize: list[Callable[[], None]] = []
        if (form := self._args.ckpt_format) == TORCH_DIST:
            request = self._write(state, common, directory, with_optimizer=with_optimizer, with_rng=with_rng)
            write: Callable[[], dict[str, str] | None] = _writing(request, copy=asynchronous)
            finalize = request.finalize_fns
        else:
            if with_rng:
                common["rng_state"] = all_gather_objects(own_rng_state())
            optimizer = state.optimizer if with_optimizer else None
            write = writer_for(form, directory, _named_chunks(state.model), optimizer, common, _collective_device())
        if state.adapters is not None:
            from slime.backends.megatron_utils.lora.peft import write_adapter

            write_adapter(state.model, self._args, directory / ADAPTER_DIRECTORY)
        self._pending = _PendingSave(write, finalize, root, iteration, directory)
        if not asynchronous:
            self.finish()

    def _write(
        self, state: TrainerState, common: dict[str, Any], directory: Path, *, with_optimizer: bool, with_rng: bool
    ) -> Any:
        """Begin a ``torch_dist`` checkpoint and return Megatron's request to write its tensors."""
        from megatron.core import dist_checkpointing

        content = {**_CONTENT, **({"non_homogeneous_layers": True} if _freezes_some_anywhere(state.model) else {})}
        sharded = _sharded_state(state, content, with_optimizer=with_optimizer, with_rng=with_rng, is_loading=False)
        return dist_checkpointing.save(
            {**sharded, **common},
            str(directory),
            in_process_strategy(parallel_over_dp=self._args.ckpt_fully_parallel_save),
            async_sharded_save=True,
            content_metadata=content,
        )

    def poll(self) -> None:
        """Publish an asynchronous save that has finished on every rank; do not wait for one that has not."""
        if self._pending is not None and self._pending.done_everywhere():
            self.finish()

    def finish(self) -> None:
        """Wait for a save in progress and publish it. Raises RuntimeError when writing failed on this rank."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.publish()
            if dist.get_rank() == 0 and not self._args.release_train:  # there the driver knows which ones count
                checkpoint_dir.remove_outdated(self._args, pending.root, pending.iteration)


class _PendingSave:
    """A save whose data is being written by a thread of this process."""

    def __init__(
        self,
        write: Callable[[], dict[str, str] | None],
        finalize: list[Callable[[], None]],
        root: Path,
        iteration: int,
        directory: Path,
    ) -> None:
        self._write, self._finalize, self.root, self.iteration = write, finalize, root, iteration
        self._directory = directory
        self._digests: dict[str, str] = {}
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"save-{iteration}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._digests = self._write() or {}
        except BaseException as error:  # noqa: BLE001 -- handed to the thread that waits, in publish()
            self._error = error

    def done_everywhere(self) -> bool:
        """Return whether all ranks have written their part (collective)."""
        done = torch.tensor([0 if self._thread.is_alive() else 1], device=_collective_device())
        dist.all_reduce(done, op=dist.ReduceOp.MIN)
        return bool(done.item())

    def publish(self) -> None:
        """Wait for all ranks, write the metadata, rename the directory, move the tracker (collective)."""
        self._thread.join()
        failures = gather_from_world(None if self._error is None else repr(self._error))
        failed = {rank: text for rank, text in enumerate(failures) if text is not None}
        if failed:
            raise RuntimeError(
                f"could not write checkpoint {self.iteration} under {self.root}: "
                + "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
                + f". Free space there: {shutil.disk_usage(self.root).free / 2**30:.1f} GiB. "
                "The previous checkpoint is untouched"
            ) from self._error
        for finalize in self._finalize:
            finalize()
        dist.barrier(group=control_group())
        write_digests(self._directory, self._digests, checkpoint_dir.rollout_files(self.root, self.iteration))
        if dist.get_rank() == 0:
            directory = checkpoint_dir.publish(self.root, self.iteration)
            logger.info("saved %s", directory)
        dist.barrier(group=control_group())


def _is_stateless(args: Args) -> bool:
    """Return True if the optimizer has nothing to save, so that its schedule is all there is to continue."""
    return args.use_stateless_adam


def _writing(request: AsyncRequest, *, copy: bool) -> Callable[[], dict[str, str]]:
    """Return what writes the tensors of Megatron's ``request``; of copies of them, if training continues meanwhile.

    It returns the digests of the files that it has written, of which the memory still has a copy.
    """
    if request.async_fn is None:
        return dict
    arguments = list(request.async_fn_args)
    arguments[1] = _staged(request.preload_fn(), copy=copy)
    paths = [Path(path) for path, _, _ in arguments[1]]

    def write() -> dict[str, str]:
        request.async_fn(*arguments)
        return {path.name: digests.digest(path) for path in paths}

    return write


def _staged(buckets: list[Any], *, copy: bool) -> Any:
    if not copy:
        return buckets
    return [
        (path, key, (byte_items, [(item, tensor.clone()) for item, tensor in tensor_items]))
        for path, key, (byte_items, tensor_items) in buckets
    ]


def _named_chunks(model: Sequence[torch.nn.Module]) -> list[tuple[str, Any]]:
    from megatron.core.utils import unwrap_model

    chunks = [unwrap_model(chunk) for chunk in model]
    return [("model", chunks[0])] if len(chunks) == 1 else [(f"model{i}", chunk) for i, chunk in enumerate(chunks)]


def _sharded_state(
    state: TrainerState, content: dict[str, Any], *, with_optimizer: bool, with_rng: bool, is_loading: bool
) -> dict[str, Any]:
    sharded: dict[str, Any] = {
        name: _part(state, chunk, chunk.sharded_state_dict(metadata=content))
        for name, chunk in _named_chunks(state.model)
    }
    if with_optimizer and state.optimizer is not None:
        sharded["optimizer"] = state.optimizer.sharded_state_dict(sharded, is_loading=is_loading, metadata=content)
        if not is_loading:
            complete_steps(sharded["optimizer"], _collective_device())
    if with_rng:
        sharded["rng_state"] = rng_state()
    return sharded


def _part(state: TrainerState, chunk: MegatronModule, sharded: dict[str, Any]) -> dict[str, Any]:
    if state.adapters is not None:
        return trained_part(chunk, sharded)
    return base_part(sharded) if state.base_only else sharded


def _part_in_plain(state: TrainerState, chunk: MegatronModule, without: str | None) -> dict[str, Any]:
    """Return the tensors of a chunk that are read from a checkpoint that holds state dicts as they are."""
    whole = chunk.state_dict_for_save_checkpoint()
    named = base_part(whole) if state.base_only else whole
    return {key: value for key, value in named.items() if without is None or not key.startswith(f"{without}.")}


def _freezes_some(model: Sequence[torch.nn.Module]) -> bool:
    return any(not parameter.requires_grad for chunk in model for parameter in chunk.parameters())


def _freezes_some_anywhere(model: Sequence[torch.nn.Module]) -> bool:
    """Return True if some rank freezes a part: one tensor of all layers' optimizer state could have gaps then."""
    found = torch.tensor([float(_freezes_some(model))], device=next(model[0].parameters()).device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found.item())


def _groups(optimizer: ChainedOptimizer) -> list[dict[str, Any]]:
    return [group for inner in torch_optimizers(optimizer) for group in inner.param_groups]


def _restore_limits(optimizer: ChainedOptimizer, rates: list[dict[str, Any]]) -> None:
    """Give every group the limits of its learning rate that it had in ``rates``, from this run's flags.

    The schedule goes by these, not by its own; those of the checkpoint are of an earlier run's flags, and of another
    group where Megatron does not tell two apart (``--decoupled-lr``).
    """
    for group, rate in zip(_groups(optimizer), rates, strict=True):
        for name in ("max_lr", "min_lr"):
            if name in rate:
                group[name] = rate[name]
            else:
                group.pop(name, None)


def _load_scheduler(args: Args, scheduler: Any | None, loaded: dict[str, Any], directory: Path) -> None:
    if scheduler is None or "opt_param_scheduler" not in loaded:
        return
    try:
        scheduler.load_state_dict(with_length_of_run(args, scheduler, loaded["opt_param_scheduler"]))
    except AssertionError as error:
        raise ValueError(
            f"the learning-rate schedule of this run differs from that in {directory} ({error}). "
            "--use-checkpoint-opt_param-scheduler keeps the checkpoint's, "
            "--override-opt_param-scheduler takes this run's"
        ) from None


def _check_space(state: TrainerState, root: Path) -> None:
    """Stop before writing when the disk cannot hold this rank's parameters."""
    parameters = [p for chunk in state.model for p in chunk.parameters() if p.requires_grad or state.adapters is None]
    needed = sum(p.numel() * p.element_size() for p in parameters)
    free = shutil.disk_usage(root).free
    if free < needed:
        raise OSError(
            f"{root} has {free / 2**30:.2f} GiB free, this rank alone writes {needed / 2**30:.2f} GiB of weights: "
            "free some space or change --save"
        )


def _collective_device() -> torch.device:
    return torch.device("cpu") if dist.get_backend() == "gloo" else torch.device("cuda", torch.cuda.current_device())
