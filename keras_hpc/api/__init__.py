# SPDX-License-Identifier: Apache-2.0
"""The functions that `import keras_hpc` gives: they connect the job, the backends and the hooks in Keras."""
