# SPDX-License-Identifier: Apache-2.0
"""Teams that do not average gradients in each step: pipelined ones, and local steps."""
