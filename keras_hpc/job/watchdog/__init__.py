# SPDX-License-Identifier: Apache-2.0
"""The watchdog: says who waits for whom, and where each rank is, when ranks wait for each other too long."""

from keras_hpc.job.watchdog.thread import Watchdog

__all__ = ["Watchdog"]
