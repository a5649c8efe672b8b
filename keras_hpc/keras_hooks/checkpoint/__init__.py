# SPDX-License-Identifier: Apache-2.0
"""What `callbacks.Checkpoint` does: when it saves, what, in which files, and how the next process goes on."""
