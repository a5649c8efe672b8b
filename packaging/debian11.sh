#!/usr/bin/env bash
# packaging/debian11.sh FOLDER [3.11|3.13]: a Debian 11 (glibc 2.31, GCC 10) in a folder, with a Python in opt/python that
# is compiled there from Debian's sources. For `packaging/wheels.py --root FOLDER`, and to try wheels on an old system.
# Needs root and debootstrap; 5 to 20 minutes.
set -euo pipefail
root=$1 version=${2:-3.13} mirror=${MIRROR:-http://deb.debian.org/debian}
case $version in
    3.11) suite=bookworm ;;
    3.13) suite=trixie ;;
    *) echo "Which Python? Expected 3.11 or 3.13. Received: $version" >&2 && exit 1 ;;
esac
packages=g++,make,xz-utils,dpkg-dev,pkg-config,zlib1g-dev,libssl-dev,libffi-dev,libbz2-dev,liblzma-dev,libsqlite3-dev
debootstrap --variant=minbase --include=$packages bullseye "$root" "$mirror"
echo "deb-src $mirror $suite main" > "$root/etc/apt/sources.list.d/python.list"
chroot "$root" sh -euc "
    apt-get -qq update
    mkdir /python && cd /python
    apt-get -qq source --download-only python$version
    tar -xf python${version}_*.orig.tar.*z
    cd Python-$version*
    ./configure -q --prefix=/opt/python
    make -s -j$(nproc)
    make -s install
    ln -s python$version /opt/python/bin/python
    rm -r /python
" > "$root/python.log" 2>&1 || { tail -20 "$root/python.log" >&2 && exit 1; }
"$(dirname "$0")/in_root.sh" "$root" /opt/python/bin/python -c 'import bz2, ctypes, lzma, sqlite3, ssl, sys; print("Python", sys.version)'
