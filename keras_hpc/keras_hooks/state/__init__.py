# SPDX-License-Identifier: Apache-2.0
"""What models and ranks keep from step to step: variables, statistics, random numbers."""
