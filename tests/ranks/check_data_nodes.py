# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F401
"""`keras_hpc.data` where each rank counts as a node: what one has read, the others get from it."""

from check_data_files import (
    _job,
    folder,
    test_each_byte_is_read_once_by_all_ranks,
    test_what_a_node_cannot_read_is_named_by_those_who_ask,
)

RANKS = {"torch": (3,)}
SOAK = {"torch": (2,), "jax": (3,)}
ENV = {"MPIR_CVAR_NUM_CLIQUES": "8"}
