"""Imports that the process has done from which ``tests.support.distributed`` forks ranks. Nothing is initialized."""

import gc

from slime.backends.megatron_utils import import_megatron

import_megatron()

import slime.backends.megatron_utils.train.trainer  # noqa: E402, F401
import tests.support.trainer  # noqa: E402, F401

gc.collect()
gc.freeze()  # a collection in a rank would copy every page that it shares with this process
