# SPDX-License-Identifier: Apache-2.0
"""Subcommands of `python -m keras_hpc`, one module each: thin, over the functions that users have."""
