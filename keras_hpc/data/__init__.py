# SPDX-License-Identifier: Apache-2.0
"""Data that are read in ranges from files, each sample once an epoch, each byte once a job.

`stores` know formats: how many samples there are, and how a range of them is read. `Dataset` says which samples make
which batch. `stage` keeps what was read on the node: `cache` in a file that the node's ranks share, `peers` from node
to node.
"""

from keras_hpc.data.dataset import Dataset
from keras_hpc.data.files import open_file
from keras_hpc.data.staging import stage, traffic
from keras_hpc.data.stores import Store, open_store

__all__ = ["Dataset", "Store", "open_file", "open_store", "stage", "traffic"]
