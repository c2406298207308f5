#!/usr/bin/env bash
# Installs moetuner, removes it, or shows it at work on a simulated board (--help).
#
# `source install.sh` only defines the functions; the tests call them one by one.
set -euo pipefail

HERE=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)
PYTHON=/usr/bin/python3 # the distribution's: bcc is built for no other
PROGRAM=/opt/moetuner
CONFIG=/etc/moetuner/moetuner.yaml

# shellcheck source=installer/machine.sh
source "$HERE/installer/machine.sh"
# shellcheck source=installer/tree.sh
source "$HERE/installer/tree.sh"

usage() {
    cat <<'TEXT'
Usage: sudo ./install.sh [OPTION]...

Installs moetuner on a Jetson with JetPack 6 or 7, or on any machine with systemd and
Python 3.10 or newer, and starts its service. Run it again to upgrade or repair.

  --no-start     install and enable, but do not start the service (and do not check)
  --prefix DIR   for the command, man page and completion (default /usr/local)
  --uninstall    stop and remove everything but the configuration
  --purge        as --uninstall, and the configuration too
  --demo         install nothing: show it at work on a simulated board (any Linux machine)
  --keep         with --demo: leave it running at the end
  --help         this text

The program goes to /opt/moetuner, the configuration to /etc/moetuner. A configuration
that you changed is kept; the new one is then put beside it as moetuner.yaml.new.

For packages: with DESTDIR set everything goes below that directory, no root is needed,
and nothing is downloaded, enabled or started. With --prefix /usr the unit goes to
/usr/lib/systemd/system instead of /etc/systemd/system.

--demo keeps its build of llama.cpp in root's cache, ~/.cache/moetuner.

Exit status: 0 done, 1 installed but a check fails, 2 usage, 3 a requirement is missing,
4 unexpected failure.
TEXT
}

say() { printf '%s\n' "$*"; }

warn() { printf 'install.sh: %s\n' "$*" >&2; }

die() { # status, text
    warn "$2"
    exit "$1"
}

# -- The service -----------------------------------------------------------------------

systemd_runs() { [[ -z $DESTDIR && -d /run/systemd/system ]]; }

unit_directory() {
    if [[ $PREFIX == /usr ]]; then say /usr/lib/systemd/system; else say /etc/systemd/system; fi
}

start_service() {
    systemctl daemon-reload
    systemctl enable --quiet moetuner.service
    if ! $START; then
        say "Not started (--no-start): systemctl restart moetuner"
        return
    fi
    systemctl reset-failed moetuner.service 2>/dev/null || true # an earlier failure must not count
    if [[ -e $TREE/pending ]] || ! systemctl is-active --quiet moetuner.service; then
        say "Starting moetuner.service"
        if ! systemctl restart moetuner.service; then
            journalctl -u moetuner.service -n 15 --no-pager -o cat >&2 || true
            die 1 "moetuner is installed, but its service does not start; the reason is above and in: journalctl -u moetuner"
        fi
    fi
    rm -f "$TREE/pending"
}

# -- Commands --------------------------------------------------------------------------

need_root() {
    [[ $EUID == 0 ]] || die 3 "root is needed: sudo ./install.sh${1:+ $1}"
}

install_all() {
    check_machine "$(uname -m)"
    if [[ -z $DESTDIR ]]; then
        need_root ""
        check_board /etc/nv_tegra_release
        systemd_runs || ! $START ||
            die 3 "systemd does not run here, so there is no service to start; --demo shows moetuner at work, --no-start prepares an image"
        [[ ! -x $PYTHON ]] || check_python "$PYTHON"
        local other=$PREFIX/bin/moetuner
        [[ ! -e $other || $(readlink "$other") == "$PROGRAM/bin/moetuner" ]] ||
            die 3 "$other is there already and is not ours; move it away"
        require missing_modules missing_headers
    fi
    check_python "$PYTHON"
    make_tree
    rm -f "$TREE/lib.link"
    install_environment
    install_program
    install_file "$PROGRAM/bin/moetuner" 755 < <(launcher)
    install_command
    install_file "$PREFIX/share/man/man8/moetuner.8" 644 <"$HERE/docs/moetuner.8"
    install_file "$PREFIX/share/bash-completion/completions/moetuner" 644 <"$HERE/etc/moetuner.bash-completion"
    install_file "$(unit_directory)/moetuner.service" 644 <"$HERE/systemd/moetuner.service"
    remove_old_files
    install_config
    if [[ -n $DESTDIR ]]; then
        remove_old_programs
        rm -f "$TREE/pending"
        say "Installed below $DESTDIR"
        return
    fi
    if systemd_runs; then
        start_service
    elif command -v systemctl >/dev/null; then
        systemctl enable --quiet moetuner.service || warn "the service could not be enabled"
    fi
    # With --no-start an old daemon may still run, from the old files.
    if $START || ! systemd_runs || ! systemctl is-active --quiet moetuner.service; then
        remove_old_programs
    fi
    say "moetuner is installed ($("$TREE/bin/moetuner" --version))"
    $START || return 0
    say
    "$TREE/bin/moetuner" --check || { # 1: it names what is missing
        local status=$?
        warn "installed, but the check above does not pass"
        exit "$status"
    }
}

# Before the program goes: nothing may stay raised.
stop_and_restore() {
    local status=0
    if systemd_runs; then
        systemctl disable --quiet --now moetuner.service 2>/dev/null || true
    elif command -v systemctl >/dev/null; then
        systemctl disable --quiet moetuner.service 2>/dev/null || true
    fi
    if "$TREE/bin/moetuner" --version >/dev/null 2>&1; then
        "$TREE/bin/moetuner" restore >/dev/null || status=$?
        case $status in
        0) ;;
        1) die 1 "nothing was removed: end the daemon named above first" ;;
        *) warn "min_freq could not be put back; a reboot does it" ;;
        esac
    fi
    rm -rf /run/moetuner
}

uninstall() {
    [[ -n $DESTDIR ]] || need_root --uninstall
    local there=false
    if [[ -d $TREE ]]; then
        there=true
        [[ -n $DESTDIR ]] || stop_and_restore
    fi
    if $PURGE; then
        rm -rf "$DESTDIR/etc/moetuner" "$DESTDIR/etc/systemd/system/moetuner.service.d"
    fi
    if $there; then
        remove_files
        if systemd_runs; then
            systemctl daemon-reload
            systemctl reset-failed moetuner.service 2>/dev/null || true
        fi
        say "moetuner is removed"
    else
        say "moetuner is not installed"
    fi
    if [[ -e $DESTDIR/etc/moetuner ]]; then
        say "The configuration stays in /etc/moetuner (--purge removes it)"
    fi
}

# Root's own cache, also under sudo: what root runs and compiles should not lie where
# others can write, and files of root would be in the user's way there.
demo_cache() {
    local cache=${XDG_CACHE_HOME:-}
    if [[ $cache != /* || (-e $cache && ! -O $cache) ]]; then
        cache=${HOME:-}
        [[ -n $cache && -O $cache ]] || cache=$(getent passwd 0 | cut -d: -f6)
        cache=$cache/.cache
    fi
    say "$cache/moetuner"
}

demo() {
    need_root --demo
    check_machine "$(uname -m)"
    check_board /etc/nv_tegra_release
    [[ ! -x $PYTHON ]] || check_python "$PYTHON"
    require missing_modules missing_headers missing_build_tools
    check_python "$PYTHON"
    local cache venv
    cache=$(demo_cache)
    venv=$cache/venv-demo
    mkdir -p "$cache"
    if ! "$venv/bin/python" -c 'import gguf, numpy, pip' 2>/dev/null; then
        say "Preparing $venv"
        rm -rf "$venv"
        "$PYTHON" -m venv --system-site-packages "$venv"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check gguf numpy ||
            die 3 "pip cannot install gguf and numpy (see above): the demonstration writes its models with them"
    fi
    # No bytecode of root's in the checkout.
    export PYTHONPATH=$HERE PYTHONPYCACHEPREFIX=$cache/pycache
    cd /
    # In our place, so that Ctrl-C is its own to clean up after.
    exec "$venv/bin/python" -m moetuner.demo --cache "$cache" "$@"
}

main() {
    local action="" keep=false
    PREFIX=/usr/local START=true PURGE=false PLACED=() STAGED=
    DESTDIR=${DESTDIR:-}
    DESTDIR=${DESTDIR%/}
    umask 022
    set -E
    trap 'warn "unexpected failure: $BASH_COMMAND"; exit 4' ERR
    trap unstage EXIT
    while (($#)); do
        case $1 in
        --demo | --uninstall | --purge)
            [[ $1 != --purge ]] || PURGE=true
            local wanted=${1#--}
            wanted=${wanted/purge/uninstall}
            [[ -z $action || $action == "$wanted" ]] || die 2 "--$action and $1 exclude each other (--help)"
            action=$wanted
            ;;
        --keep) keep=true ;;
        --no-start) START=false ;;
        --prefix)
            (($# > 1)) || die 2 "--prefix needs a directory (--help)"
            PREFIX=$2
            shift
            ;;
        --prefix=*) PREFIX=${1#*=} ;;
        -h | --help)
            usage
            return
            ;;
        *) die 2 "unknown option $1 (--help names them)" ;;
        esac
        shift
    done
    [[ $PREFIX == /* && $PREFIX != *[[:space:]]* ]] || die 2 "--prefix takes an absolute path without spaces"
    [[ -z $DESTDIR || $DESTDIR == /* ]] || die 2 "DESTDIR is an absolute path"
    ! $keep || [[ $action == demo ]] || die 2 "--keep goes with --demo (--help)"
    PREFIX=${PREFIX%/}
    TREE=$DESTDIR$PROGRAM
    case $action in
    "") install_all ;;
    uninstall) uninstall ;;
    demo) if $keep; then demo --keep; else demo; fi ;;
    esac
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
    main "$@"
fi
