# SPDX-License-Identifier: Apache-2.0
"""`init(shard_optimizer=True)`: each rank keeps its part of the optimizer's state, and updates its part of the weights.

After Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, stage 1.
"""
