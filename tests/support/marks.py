"""Conditions of tests that several modules share."""

from __future__ import annotations

import pytest
import torch

needs_no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="what it tests is done on machines without CUDA")
