# SPDX-License-Identifier: Apache-2.0
"""Virtual ranks (`init(virtual_ranks=)`): each rank computes its parts of a global batch in turn, each as one rank."""
