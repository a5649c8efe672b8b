# SPDX-License-Identifier: Apache-2.0
"""Where gradients become those of all ranks: in every optimizer's update, in users' loops, before clipping."""
