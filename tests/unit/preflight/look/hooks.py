"""Hooks with the mistakes of beginners."""

from __future__ import annotations

import asyncio
import os
import time

import numpy as np


def good(args, sample, **kwargs):
    return float(sample.response == sample.label)


async def good_numpy(args, sample, **kwargs):
    return np.float32(0.5)


def generate(args, sample, sampling_params):
    return sample


def nothing(args, sample, **kwargs):
    pass


def text(args, sample, **kwargs):
    return "1.0"


def entry(args, sample, **kwargs):
    return {"score": 1.0}


def not_finite(args, sample, **kwargs):
    return float("nan")


def raising(args, sample, **kwargs):
    return float(sample.response.split("<answer>")[1])  # IndexError


def group(args, samples, **kwargs):
    return [0.0 for _ in samples]


async def hanging(args, sample, **kwargs):
    await asyncio.sleep(1000)


async def blocking(args, sample, **kwargs):
    time.sleep(1000)


def ending(args, sample, **kwargs):
    print("goodbye")
    os._exit(3)


def one_argument(sample):
    return 1.0
