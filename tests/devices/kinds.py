"""Marks of tests, or of their parameters, for one kind of device."""

from __future__ import annotations

import pytest
import torch

on_host = pytest.mark.skipif(torch.cuda.is_available(), reason="the host driver's regions")
on_cuda = pytest.mark.gpu
