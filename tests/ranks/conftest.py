# SPDX-License-Identifier: Apache-2.0
"""What checks ask for by name: `pytestmark = pytest.mark.usefixtures("global_batches")`."""

import pytest


@pytest.fixture(scope="module")
def global_batches():
    """A job, for all tests of a file, in which ranks take parts of each batch."""
    import keras_hpc

    keras_hpc.init(batch="global")
    yield
    keras_hpc.finalize()
