# SPDX-License-Identifier: Apache-2.0
"""keras_hpc for Spack: belongs into `packages/py_keras_hpc` of a repository of packages."""

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyKerasHpc(PythonPackage):
    """One line turns a Keras 3 script into a data-parallel MPI job."""

    homepage = "https://github.com/keras-hpc/keras_hpc"
    url = "https://github.com/keras-hpc/keras_hpc/archive/refs/tags/v0.1.0.tar.gz"

    license("Apache-2.0", checked_by="keras-hpc")

    version("0.1.0", sha256="0000000000000000000000000000000000000000000000000000000000000000")

    depends_on("cxx", type="build")
    depends_on("cmake@3.18:", type="build")
    depends_on("ninja", type="build")
    depends_on("python@3.11:3.13", type=("build", "run"))
    depends_on("py-scikit-build-core@0.10:1", type="build")
    depends_on("py-nanobind@2.4:3", type="build")

    depends_on("py-keras@3.10:", type=("build", "run"))
    depends_on("py-mpi4py@4", type=("build", "run"))
    depends_on("py-numpy@1.26:2", type=("build", "run"))
    depends_on("py-ml-dtypes@0.4:0", type=("build", "run"))
    depends_on("py-xxhash@3.4:4", type=("build", "run"))
    # Writes tensors without a copy of them from 0.8 on; Spack has 0.6.2 so far.
    depends_on("py-safetensors@0.8:0", type=("build", "run"))
    # Not linked: found at run time through mpi4py.
    depends_on("mpi", type="run")

    @run_after("install")
    @on_package_attributes(run_tests=True)
    def check_install(self):
        """Start the command."""
        python("-m", "keras_hpc", "--version")
