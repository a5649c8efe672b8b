# SPDX-License-Identifier: Apache-2.0
"""Measurements of the engine, which `python -m keras_hpc bench` runs. None of them needs Keras."""
