"""``Traits``: what is true of a flag beside its value. They stand where the flag is declared, and rules ask for them.

slime's own flags declare them in ``groups``; those of Megatron, SGLang and the router have them in
``passthrough.traits``. ``command_line.flags_where`` finds flags by them, ``--help --FLAG`` shows them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from slime.arguments.args import Args

UNSET: Any = object()
"""No value, where None is one."""


@dataclass(frozen=True)
class Contract:
    """Contract of a hook: the call of its function.

    ``call``: the signature, for messages. The function must take ``positional`` arguments and these ``keywords``; it
    is given what it takes of those ``offered``. A class is also asked for ``methods``. What ``generates`` is not called
    when rollouts are replayed. ``makes_samples`` and ``changes_samples``: what it may set on samples that are trained.
    ``caller``: the process that calls it. ``flag``: the option that names it, filled in where contracts are looked up.
    """

    call: str
    positional: int
    keywords: tuple[str, ...] = ()
    offered: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    what: str = "a function"
    generates: bool = False
    caller: Literal["manager", "trainer", "parser"] = "manager"
    makes_samples: bool = False
    changes_samples: bool = False
    flag: str = ""


@dataclass(frozen=True)
class Template:
    """A path with placeholders: ``names`` are filled in, without those ``needed`` files would overwrite each other."""

    names: tuple[str, ...]
    needed: tuple[str, ...]
    example: str


@dataclass(frozen=True)
class Needs:
    """The option without which a flag has no effect, in words, and ``or_else``, which may stand in for it."""

    option: str
    or_else: Callable[[Args], object]


@dataclass(frozen=True)
class WithoutGpu:
    """The value on a machine without a GPU: for everyone (``refuses`` is the option that asks for the opposite, None
    where both are fine), or only where none is given."""

    value: Any
    refuses: str | None = None
    given_holds: bool = False


Silencer = Literal[
    "rollout without hooks", "rollout without samples", "own rollout", "fully asynchronous", "nothing left over",
    "episodes", "replay", "no engines", "no trainer", "--eval-config", "no data set", "--num-rollout", "own conversion",
    "own post-processing", "own advantages", "no discount", "no baseline", "no scaling", "sft_loss", "own reward",
]  # fmt: skip
"""Settings that take the effect from a flag: the keys of ``rules.silenced.SILENCERS``."""


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Traits of a flag; in brackets the module that reads them.

    Reading: ``read_by`` the trainers, of which a role may have a different value, or by the rest of the run
    (``rules.roles``); ``saved``: part of a configuration, not of one call (``files.run_config``).
    Values: ``default``, where slime's is not that of the package that has the flag. ``path`` names a file, a
    directory, or a directory with a model; ``template`` has placeholders; ``hook`` names a function. ``follows``: the
    attribute whose value is the default. ``resolved_by``: the module of ``rules`` after which None is replaced.
    ``variable`` of the environment gives a flag of the log-prob server where the command line does not.
    Effects: ``needs`` an option, ``silenced_by`` others (both ``rules.silenced``);
    ``decides_generation``: groups made under another value are not used again (``rollout.durable``);
    ``without_advantages``: refused when none are computed.
    Roles: ``same_for_roles`` because ranks are paired (``layout``) or batches divided once (``batches``); ``critic`` is
    the critic's value; ``from_sizes``: derived from the sizes of the model; ``restarts``: drops the training state.
    Availability: ``not_yet`` at all, or for these values; ``inert``: why it can have no effect.
    Devices: ``without_gpu``; ``gpu_values`` need one; ``fused_kernel`` and ``needs_te``: need TransformerEngine.
    Placement: ``takes_turns``: engines and trainers do; ``deploys``: says which engines there are; ``divides_layers``
    among pipeline stages; ``divides_model``: ranks hold parts of it.
    Model: ``needs_experts``: describes a mixture of experts; ``left_out``: what leaving it out means for
    ``config.json``; ``random``: differs between the passes of training and of log-probs; ``dtype`` names one.
    """

    read_by: Literal["trainers", "run"] | None = None
    default: Any = UNSET
    saved: bool = True
    path: Literal["file", "directory", "model"] | None = None
    template: Template | None = None
    hook: Contract | None = None
    follows: str | None = None
    resolved_by: str | None = None
    variable: str | None = None
    needs: str | Needs | None = None
    silenced_by: tuple[Silencer, ...] = ()
    decides_generation: bool = False
    without_advantages: bool = False
    same_for_roles: Literal["layout", "batches"] | None = None
    critic: Any = UNSET
    from_sizes: bool = False
    takes_turns: bool = False
    deploys: bool = False
    divides_layers: bool = False
    divides_model: bool = False
    restarts: bool = False
    not_yet: bool | tuple[Any, ...] = False
    inert: str = ""
    without_gpu: WithoutGpu | None = None
    gpu_values: tuple[str, ...] = ()
    fused_kernel: bool = False
    needs_te: bool = False
    needs_experts: bool = False
    left_out: Any = None
    random: bool = False
    dtype: bool = False


NONE = Traits()
