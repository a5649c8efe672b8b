# SPDX-License-Identifier: Apache-2.0
"""Gives each rank its part of the data that the user hands to `fit`, `evaluate` and `predict`.

`partition` knows which samples are whose; one module for each kind of data carries that out (`arrays`, `tf_datasets`,
`py_datasets`, `torch_loaders`, `streams`); `sharding` chooses among them and lets the ranks agree.
"""
