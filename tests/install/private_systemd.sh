#!/usr/bin/env bash
# A systemd to install into, beside whatever this machine boots with.
#
#   unshare --mount --propagation private tests/install/private_systemd.sh BOARD
#
# The service manager is a user's (`systemd --user`, run by root): it executes units, with
# their sandbox, as the system's does, and does not have to be process 1. In a mount
# namespace of its own it serves the socket that systemctl talks to. /etc, /opt and
# /usr/local are overlays, /run is empty, and BOARD appears as /run/board. The machine's
# pids are kept: eBPF reports those.
#
# Prints `ready DIRECTORY`, where DIRECTORY/{etc,opt,local} hold what was written; ends,
# and everything with it, at the end of standard input.
set -euo pipefail

board=$1
manager=/usr/lib/systemd/systemd
[[ -x $manager ]] || manager=/lib/systemd/systemd
group=moetuner-test-$$

own=$(mktemp -d /tmp/moetuner-systemd.XXXXXX)
mount -t tmpfs -o mode=755 tmpfs "$own" # overlays cannot lie on overlays, as in containers
for directory in /etc /opt /usr/local; do
    name=${directory##*/}
    mkdir -p "$own/$name" "$own/work/$name"
    mount -t overlay -o "lowerdir=$directory,upperdir=$own/$name,workdir=$own/work/$name" overlay "$directory"
done

mkdir "$own/cgroup"
mount -t cgroup2 cgroup2 "$own/cgroup"
mkdir "$own/cgroup/$group"
finish() {
    exec 2>/dev/null
    echo $$ >"$own/cgroup/cgroup.procs"
    echo 1 >"$own/cgroup/$group/cgroup.kill"
    for _ in {1..50}; do
        find "$own/cgroup/$group" -depth -type d -exec rmdir {} + && break
        sleep 0.1
    done
    umount -l "$own"
    rmdir "$own"
}
trap finish EXIT
echo $$ >"$own/cgroup/$group/cgroup.procs"
umount -l /sys/fs/cgroup
mount --bind "$own/cgroup" /sys/fs/cgroup

mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/systemd/system /run/systemd/inaccessible/dir /run/board /run/units
mount --bind "$board" /run/board
(
    # What the manager of a booted system has put there.
    cd /run/systemd/inaccessible
    touch reg
    mkfifo fifo
    mknod chr c 0 0
    mknod blk b 0 0
    chmod 000 ./*
)
for target in default multi-user; do
    printf '[Unit]\nDescription=%s\n' "$target" >"/run/units/$target.target"
done
mkdir -p /run/config/systemd
ln -s /etc/systemd/system /run/config/systemd/user # where `systemctl enable` puts links

export XDG_RUNTIME_DIR=/run XDG_CONFIG_HOME=/run/config
SYSTEMD_UNIT_PATH=/etc/systemd/system:/run/units:/usr/lib/systemd/user \
    "$manager" --user --log-target=console </dev/null >"$own/log" 2>&1 &
for _ in {1..100}; do
    [[ -S /run/systemd/private ]] && break
    sleep 0.1
done
[[ -S /run/systemd/private ]] || {
    cat "$own/log" >&2
    exit 1
}
echo "ready $own"
cat >/dev/null
