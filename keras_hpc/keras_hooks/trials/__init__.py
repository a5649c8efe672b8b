# SPDX-License-Identifier: Apache-2.0
"""What is tried before training, on made-up samples: where ranks could not compute what one rank would, they say so."""
