#!/usr/bin/env bash
# packaging/in_root.sh FOLDER COMMAND...: run a command in the system that is in a folder, with processes and devices of
# this one, which are gone from the folder when it ends. Needs root.
set -euo pipefail
root=$1 && shift
export root
exec unshare --mount sh -euc 'mount -t proc proc "$root/proc"; mount --rbind /dev "$root/dev"
    exec env -i HOME=/root PATH=/opt/python/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 chroot "$root" "$@"' sh "$@"
