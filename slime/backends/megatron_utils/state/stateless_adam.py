"""Adam without moments: every step is the first step of a fresh Adam, so there is nothing to keep or to save."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

_ONLY_STEP = 1
"""The ``step`` of every parameter group: a fresh optimizer is always at its first."""


class StatelessAdam(torch.optim.Optimizer):
    """Kingma and Ba 2015, https://arxiv.org/abs/1412.6980 (AdamW: Loshchilov and Hutter 2019,
    https://arxiv.org/abs/1711.05101) with moments that are forgotten after each step.

    With ``m = v = 0`` before a step, bias correction leaves ``m_hat = g`` and ``v_hat = g**2``:
    ``p -= lr * g / (|g| + eps)``; without it the numerator is ``(1 - beta1) g``, the root ``sqrt(1 - beta2) |g|``.
    Decay multiplies ``p`` by ``1 - lr * weight_decay`` before (``adam_w_mode``), or adds ``weight_decay * p`` to ``g``.
    Parameters of less than 32 bits are stepped in fp32 and rounded.

    ``use_decoupled_grad`` reads ``p.decoupled_grad`` instead of ``p.grad``; ``set_grad_none`` is the default of
    ``zero_grad``. Further keywords of other Adams are accepted and have no effect. ``state`` is always empty, also
    after ``load_state_dict``, which takes the options of the groups only.

    Raises NotImplementedError for ``amsgrad`` and ``master_weights``, which are state; ValueError for options out of
    range; in ``step`` RuntimeError for a sparse gradient.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        maximize: bool = False,
        use_decoupled_grad: bool = False,
        master_weights: bool = False,
        set_grad_none: bool | None = None,
        **ignored: object,
    ) -> None:
        if amsgrad:
            raise NotImplementedError("StatelessAdam keeps no maximum of second moments: leave amsgrad out")
        if master_weights:
            raise NotImplementedError("StatelessAdam keeps no master weights: pass fp32 parameters instead")
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "maximize": maximize,
            "step": _ONLY_STEP,
        }
        self.adam_w_mode = bool(adam_w_mode)
        self.use_decoupled_grad = bool(use_decoupled_grad)
        self.set_grad_none = set_grad_none
        super().__init__(params, defaults)
        for group in self.param_groups:
            _check(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient; return what ``closure`` returns, which is called before."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] = _ONLY_STEP
            for parameter in group["params"]:
                gradient = getattr(parameter, "decoupled_grad", None) if self.use_decoupled_grad else parameter.grad
                if gradient is None:
                    continue
                if gradient.is_sparse:
                    raise RuntimeError("StatelessAdam does not take sparse gradients; make them dense")
                self._step(parameter, gradient, group)
        return loss

    def _step(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        stepped, g = parameter.to(dtype), gradient.to(dtype)  # the parameter itself unless it has less than 32 bits
        lr, decay, eps = float(group["lr"]), float(group["weight_decay"]), float(group["eps"])
        if group.get("maximize"):
            g = -g
        if decay and self.adam_w_mode:
            stepped.mul_(1 - lr * decay)
        elif decay:
            g = g + decay * stepped
        root, scale = g.abs(), lr
        if not group.get("bias_correction", True):
            beta1, beta2 = group["betas"]
            root, scale = root.mul_((1 - beta2) ** 0.5), lr * (1 - beta1)
        stepped.addcdiv_(g, root.add_(eps), value=-scale)
        if stepped is not parameter:
            parameter.copy_(stepped)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients, or zero them with ``set_to_none`` False (default ``set_grad_none``, then True)."""
        asked = self.set_grad_none if set_to_none is None else set_to_none
        super().zero_grad(set_to_none=True if asked is None else asked)
        if self.use_decoupled_grad:
            for parameter in (p for group in self.param_groups for p in group["params"]):
                if getattr(parameter, "decoupled_grad", None) is not None:
                    if asked is False:
                        parameter.decoupled_grad.zero_()
                    else:
                        parameter.decoupled_grad = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the options of the parameter groups; moments of another Adam are left out."""
        super().load_state_dict({**state_dict, "state": {}})
        self.state.clear()
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            group["step"] = _ONLY_STEP


def _check(group: dict[str, Any]) -> None:
    beta1, beta2 = group["betas"]
    for name, value, valid in (
        ("lr", group["lr"], group["lr"] >= 0),
        ("eps", group["eps"], group["eps"] >= 0),
        ("weight_decay", group["weight_decay"], group["weight_decay"] >= 0),
        ("betas[0]", beta1, 0 <= beta1 < 1),
        ("betas[1]", beta2, 0 <= beta2 < 1),
    ):
        if not valid:
            raise ValueError(f"StatelessAdam: {name} is {value}; expected {'0 to below 1' if '[' in name else '>= 0'}")


@contextmanager
def instead_of_adam() -> Iterator[None]:
    """Within the body Megatron builds its optimizers around ``StatelessAdam``.

    Megatron takes its Adam from names of two modules and has no other way in. With the flag below unset it passes
    ``adam_w_mode`` as to TransformerEngine's and apex's Adam.
    """
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    kept = optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER, distrib_optimizer.Adam
    optimizer.Adam = distrib_optimizer.Adam = StatelessAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    try:
        yield
    finally:
        optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER, distrib_optimizer.Adam = kept
