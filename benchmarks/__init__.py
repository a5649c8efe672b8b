# SPDX-License-Identifier: Apache-2.0
"""Measurements of the engine, for those who work on it: `python -m benchmarks --help`."""
