# SPDX-License-Identifier: Apache-2.0
"""What a job is: its launch, ranks, teams and plans, and how it ends. Knows the engine, and nothing of Keras."""
