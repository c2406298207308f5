# shellcheck shell=bash
# The installed files: written in one step each, listed, removed. Part of install.sh.
#
# $DESTDIR and $PREFIX are the user's, $TREE is $DESTDIR/opt/moetuner:
#   lib -> lib.XXXXXX   the program; the link is exchanged when the new one is complete
#   venv  bin           its environment and the command
#   manifest            files (f) and directories (d) elsewhere that are ours
#   shipped.yaml        the configuration as it was installed, to tell whether it was changed
#   pending             something changed since the service was last restarted

# -- The program's tree ----------------------------------------------------------------

# A directory that is removed if we end before it is in its place.
stage() { # name
    STAGED=$(mktemp -d "$TREE/$1.XXXXXX")
    chmod 755 "$STAGED"
}

unstage() { [[ -z ${STAGED:-} ]] || rm -rf "$STAGED"; }

# Until the service was restarted, by this run or, if it is interrupted, by the next.
changed() { : >"$TREE/pending"; }

make_tree() {
    local path=$PROGRAM
    local -a made=()
    mkdir -p "$DESTDIR/"
    while path=$(dirname "$path") && [[ ! -d $DESTDIR$path ]]; do
        made=("d $path" "${made[@]}")
    done
    mkdir -p "$TREE/bin"
    ((${#made[@]} == 0)) || printf '%s\n' "${made[@]}" >>"$TREE/manifest"
}

# Changes with any byte of the program, and with the Python that it is compiled for.
digest() { # directory
    {
        (cd "$1" && find moetuner probes -type f ! -name '*.pyc' -print0 | sort -z | xargs -0 sha256sum)
        "$PYTHON" -VV
    } | sha256sum
}

# $TREE/lib is a link to lib.XXXXXX: exchanged in one step, and a daemon that still runs
# keeps its own files until it is restarted.
install_program() {
    stage lib
    cp -R "$HERE/moetuner" "$HERE/probes" "$STAGED/"
    find "$STAGED" -name __pycache__ -prune -exec rm -rf {} +
    chmod -R u=rwX,go=rX "$STAGED" # whatever the checkout's own modes are
    digest "$STAGED" >"$STAGED/digest"
    if cmp -s "$STAGED/digest" "$TREE/lib/digest"; then
        unstage
        STAGED=
        return
    fi
    "$PYTHON" -m compileall -q -s "$STAGED" -p "$PROGRAM/lib" "$STAGED" ||
        die 4 "the program does not compile with $("$PYTHON" -V)"
    [[ -n $DESTDIR ]] || (cd / && PYTHONPATH=$STAGED "$PYTHON" -m moetuner --version >/dev/null) ||
        die 4 "the program does not run with $("$PYTHON" -V); nothing was changed"
    changed
    ln -s "$(basename "$STAGED")" "$TREE/lib.link"
    mv -T "$TREE/lib.link" "$TREE/lib"
    STAGED=
}

remove_old_programs() {
    local current path
    current=$(readlink "$TREE/lib")
    for path in "$TREE"/lib.* "$TREE"/venv.*; do
        [[ ! -e $path || $path == "$TREE/$current" ]] || rm -rf "$path"
    done
}

# Kept if it works, with whatever somebody installed into it (jetson-stats, say).
install_environment() {
    local site version
    version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    site=lib/python$version/site-packages
    [[ -x $TREE/venv/bin/python3 && -f $TREE/venv/$site/moetuner.pth ]] && return
    stage venv
    "$PYTHON" -m venv --system-site-packages --without-pip "$STAGED"
    rm -f "$STAGED"/bin/[Aa]ctivate* # they name the directory that we are about to leave
    sed -i '/^command = /d' "$STAGED/pyvenv.cfg"
    # Relative to where it lies, so that the tree can stand below DESTDIR.
    say ../../../../lib >"$STAGED/$site/moetuner.pth"
    changed
    rm -rf "$TREE/venv"
    mv -T "$STAGED" "$TREE/venv"
    STAGED=
}

launcher() {
    cat <<'TEXT'
#!/bin/sh
# -I: neither the caller's directory nor its PYTHON* variables take part.
exec "$(dirname "$(readlink -f "$0")")/../venv/bin/python3" -I -m moetuner "$@"
TEXT
}

# -- Files elsewhere, listed in $TREE/manifest -----------------------------------------

record() { # f or d, path
    grep -qxF "$1 $2" "$TREE/manifest" 2>/dev/null || say "$1 $2" >>"$TREE/manifest"
}

make_directory() { # path without DESTDIR
    [[ -d $DESTDIR$1 ]] && return
    make_directory "$(dirname "$1")"
    record d "$1"
    mkdir "$DESTDIR$1"
}

# Standard input as a file; an existing one is replaced in one step, if it differs.
install_file() { # path without DESTDIR, mode
    local target=$DESTDIR$1
    make_directory "$(dirname "$1")"
    record f "$1"
    PLACED+=("$1")
    cat >"$target.moetuner-new"
    chmod "$2" "$target.moetuner-new"
    if cmp -s "$target.moetuner-new" "$target"; then
        rm "$target.moetuner-new"
    else
        changed
        mv -T "$target.moetuner-new" "$target"
    fi
}

install_command() {
    local path=$PREFIX/bin/moetuner
    make_directory "$PREFIX/bin"
    record f "$path"
    PLACED+=("$path")
    [[ $(readlink "$DESTDIR$path") == "$PROGRAM/bin/moetuner" ]] ||
        ln -sfn "$PROGRAM/bin/moetuner" "$DESTDIR$path"
}

# What an earlier version, or an earlier --prefix, had installed and this one did not.
remove_old_files() {
    local kind path gone=false
    local -a kept=()
    while read -r kind path; do
        if [[ $kind == f && " ${PLACED[*]} " != *" $path "* ]]; then
            rm -f "$DESTDIR$path"
            gone=true
        else
            kept+=("$kind $path")
        fi
    done <"$TREE/manifest"
    $gone || return 0
    printf '%s\n' "${kept[@]}" >"$TREE/manifest.new"
    mv "$TREE/manifest.new" "$TREE/manifest"
}

# Replaced only if it still is what an earlier installation put there.
install_config() {
    local target=$DESTDIR$CONFIG shipped=$HERE/etc/moetuner.yaml last=$TREE/shipped.yaml
    make_directory "$(dirname "$CONFIG")"
    if cmp -s "$shipped" "$target"; then
        rm -f "$target.new"
    elif [[ ! -e $target && ! -L $target ]] || { [[ ! -L $target ]] && cmp -s "$target" "$last"; }; then
        install -m 644 "$shipped" "$target.tmp"
        mv -T "$target.tmp" "$target"
        rm -f "$target.new"
    elif ! cmp -s "$shipped" "$last"; then
        install -m 644 "$shipped" "$target.new"
        say "You changed $CONFIG: it is kept, and the new one is beside it as moetuner.yaml.new"
    fi
    cmp -s "$shipped" "$last" || install -m 644 "$shipped" "$last"
}

remove_files() {
    local line
    local -a manifest=()
    [[ ! -f $TREE/manifest ]] || mapfile -t manifest < <(tac "$TREE/manifest") # innermost first
    rm -rf "$TREE"
    for line in "${manifest[@]}"; do
        case $line in
        "f "*) rm -f "$DESTDIR${line#f }" "$DESTDIR${line#f }.moetuner-new" ;;
        "d "*) rmdir "$DESTDIR${line#d }" 2>/dev/null || true ;; # others use it too
        esac
    done
}
