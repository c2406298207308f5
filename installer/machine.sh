# shellcheck shell=bash
# What this machine is and has, and the packages that bring the rest. Part of install.sh.
#
# Functions take the files and programs that they look at, so that tests can give others.

# Python module, and the package that brings it.
MODULES=(
    bcc:python3-bpfcc capstone:python3-capstone elftools:python3-pyelftools
    psutil:python3-psutil pyudev:python3-pyudev regex:python3-regex rich:python3-rich
    sdnotify:python3-sdnotify yaml:python3-yaml
)
# Program, and the package that brings it: what --demo builds llama.cpp with.
BUILD_TOOLS=(c++:build-essential make:build-essential cmake:cmake ninja:ninja-build)

# -- What is there ---------------------------------------------------------------------

# `36` for a Jetson with L4T R36 (JetPack 6), nothing for any other machine.
l4t_major() { # /etc/nv_tegra_release
    [[ -r $1 ]] || return 0
    sed -nE '1s/^# R([0-9]+) \(release\).*/\1/p' "$1"
}

check_board() { # /etc/nv_tegra_release
    local major
    major=$(l4t_major "$1")
    case $major in
    "" | 36 | 38 | 39) ;;
    34 | 35) die 3 "this board runs JetPack 5 (L4T R$major), whose Python is 3.8; moetuner needs Python 3.10: install JetPack 6 or 7" ;;
    *)
        ((major > 39)) || die 3 "this board runs L4T R$major, which is too old: moetuner needs JetPack 6 or 7"
        warn "L4T R$major is newer than anything that moetuner was made for (JetPack 6 and 7): trying"
        ;;
    esac
}

check_machine() { # uname -m
    [[ $1 == aarch64 || $1 == x86_64 ]] || die 3 "moetuner runs on aarch64 and x86_64, not on $1"
}

check_python() { # python
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
        die 3 "$1 is $("$1" -V 2>&1 || true): moetuner needs Python 3.10 or newer"
}

# Packages whose Python modules or libraries `python` does not find, one a line.
missing_modules() { # python
    "$1" -I - "${MODULES[@]}" <<'PYTHON' 2>/dev/null && return 0
import ctypes
import importlib.util
import sys

for entry in sys.argv[1:]:
    module, package = entry.split(":")
    if importlib.util.find_spec(module) is None:
        print(package)
if importlib.util.find_spec("venv") is None:
    print("python3-venv")
for name in ("libbpf.so.1", "libbpf.so.0"):
    try:
        ctypes.CDLL(name)
        break
    except OSError:
        pass
else:
    print("libbpf1")
PYTHON
    printf '%s\n' python3 "${MODULES[@]##*:}" libbpf1
}

# `kernel headers` if the program would find none.
missing_headers() { # python
    PYTHONPATH=$HERE PYTHONDONTWRITEBYTECODE=1 "$1" -c '
from moetuner.errors import MissingRequirement
from moetuner.watch import headers
try:
    headers.find()
except MissingRequirement:
    print("kernel headers")' 2>/dev/null || say "kernel headers"
}

missing_build_tools() { # python
    local entry
    for entry in "${BUILD_TOOLS[@]}"; do
        command -v "${entry%%:*}" >/dev/null || say "${entry##*:}"
    done | sort -u
    # A header, not a program. Without it the expert cache reads with threads only.
    c++ -E -x c++ - <<<'#include <liburing.h>' >/dev/null 2>&1 || say liburing-dev
    # ensurepip is what Debian leaves out of its Python.
    "$1" -c 'import ensurepip' 2>/dev/null || say python3-venv
}

# -- Packages --------------------------------------------------------------------------

apt_knows() { apt-cache show "$1" >/dev/null 2>&1; }

# The name that this release has for what missing_* named.
package_for() { # what is missing, kernel release
    local candidate
    local -a candidates=("$1")
    case $1 in
    libbpf1) candidates=(libbpf1 libbpf0) ;; # Ubuntu 22.04 has the older one
    "kernel headers")
        # The probe reads no kernel structure, so the last two serve any kernel.
        candidates=("linux-headers-$2" nvidia-l4t-kernel-headers
            "linux-headers-$(dpkg --print-architecture)" linux-headers-generic)
        ;;
    esac
    for candidate in "${candidates[@]}"; do
        if apt_knows "$candidate"; then
            say "$candidate"
            return
        fi
    done
    say "${candidates[-1]}"
}

install_packages() { # what is missing...
    command -v apt-get >/dev/null ||
        die 3 "missing: $(joined "$@"); there is no apt-get here, so install them in this system's own way"
    local log item
    local -a packages=()
    log=$(mktemp)
    export DEBIAN_FRONTEND=noninteractive
    say "Reading package lists"
    apt-get -o DPkg::Lock::Timeout=300 update >"$log" 2>&1 </dev/null || true # known ones may do
    for item in "$@"; do
        packages+=("$(package_for "$item" "$(uname -r)")")
    done
    say "Installing $(joined "${packages[@]}")"
    if ! apt-get -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "${packages[@]}" \
        >>"$log" 2>&1 </dev/null; then
        grep -E '^(E|W|Err):' "$log" | tail -n 10 >&2 || true
        rm -f "$log"
        die 3 "apt-get cannot install what is missing: $(joined "${packages[@]}"); give this machine access to its package mirror, or install them by hand, and run this again"
    fi
    rm -f "$log"
}

joined() { # a, b, c
    local text
    text=$(printf '%s, ' "$@")
    say "${text%, }"
}

require() { # function...: each prints what is missing
    local -a missing
    local check
    mapfile -t missing < <(for check in "$@"; do "$check" "$PYTHON"; done | awk '!seen[$0]++')
    ((${#missing[@]})) || return 0
    install_packages "${missing[@]}"
    mapfile -t missing < <(for check in "$@"; do "$check" "$PYTHON"; done | awk '!seen[$0]++')
    ((${#missing[@]} == 0)) || die 3 "still missing after the installation: $(joined "${missing[@]}")"
}
