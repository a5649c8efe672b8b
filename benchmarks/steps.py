# SPDX-License-Identifier: Apache-2.0
"""Steps that compute by sleeping, with the timeline of a real model; what they send is real."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from keras_hpc.job.plan import Plan
from keras_hpc.tools.timeline import Timeline


def step_of(plan: Plan, timeline: Timeline, *, reduces: bool = True) -> Callable[[], float]:
    """Returns a function that makes a step, without its update, and returns the seconds that it took.

    Args:
        plan: of the timeline's gradients.
        timeline: when each is there.
        reduces: whether they are reduced.
    """
    arrays = [np.ones(n, np.float32) for n in timeline.elements]
    order = sorted(range(len(arrays)), key=lambda i: timeline.ready[i])

    def run() -> float:
        begin = time.perf_counter()
        for i in order:
            left = begin + timeline.compute_s * timeline.ready[i] - time.perf_counter()
            if left > 0:
                time.sleep(left)
            if reduces:
                plan.start(i, arrays[i])
        for i in range(len(arrays) if reduces else 0):
            plan.wait(i)
        return time.perf_counter() - begin

    return run
