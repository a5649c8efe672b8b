"""`python -m keras_hpc doctor` of ranks that compute on a GPU that is not there."""

import argparse

import fake_gpu

from keras_hpc.tools import doctor

fake_gpu.pytest_configure(None)
doctor.run(argparse.Namespace(parameters=1 << 20, data=None, json=None))
