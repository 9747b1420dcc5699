# Sourced by the scripts beside it, which first call `help_if_asked "$@"`. `need_rust` finds or installs a toolchain, `install_needs
# PACKAGE...` installs the missing ones of these Debian packages; when nothing is missing neither uses the network.

# Packages for building: the crates compile libbpf, libelf and libxdp from source.
BUILD_PACKAGES=(clang llvm m4 libelf-dev zlib1g-dev pkg-config make gcc libc6-dev libc6-dev-i386)
# Packages for the lab.
LAB_PACKAGES=(iproute2 ethtool procps)
# Packages for ci/package: strip, and what dpkg-deb needs.
PACKAGE_PACKAGES=("${BUILD_PACKAGES[@]}" binutils libc-bin)
# Packages for the checks of captures.
TEST_PACKAGES=("${LAB_PACKAGES[@]}" iputils-ping iperf3 tshark bpftool)
# Packet filters and listeners of the operations (ci/operations).
TEST_PACKAGES+=(nftables tcpdump)
# Programs that run unchanged over SDP. Debian has no netperf.
TEST_PACKAGES+=(netcat-openbsd socat curl python3 redis-server memcached nginx-light apache2-utils wrk sockperf openssh-server postgresql)
# Libraries of programs that the tests build and run over SDP. asio is boost.asio without the rest of Boost.
TEST_PACKAGES+=(libevent-dev libuv1-dev libasio-dev g++)
# RDMA programs that run over the drop-in libraries, and the headers whose structures those are compared with.
TEST_PACKAGES+=(ibverbs-utils rdmacm-utils perftest qperf libfabric-bin libibverbs-dev librdmacm-dev)
# MPI over them.
TEST_PACKAGES+=(openmpi-bin libopenmpi-dev)
# systemd-analyze judges the unit of xwarpd.
TEST_PACKAGES+=(systemd)
# The suite of pyverbs, and storage over RDMA.
TEST_PACKAGES+=(python3-pyverbs fio tgt libiscsi-dev)
# memcheck over the drop-in libraries.
TEST_PACKAGES+=(valgrind)
# Root file systems of other releases (ci/distributions).
TEST_PACKAGES+=(mmdebstrap)

# The comment at the top of the script that is running, which describes it.
describe() {
    sed -n '2,/^[^#]/{/^[^#]/d;s/^# \{0,1\}//;p}' "$0"
}

# Call before anything else: `--help` or `-h` as the first argument prints the script's description and ends it.
help_if_asked() { # "$@"
    case ${1:-} in
        --help | -h)
            describe
            exit 0
            ;;
    esac
}

# The same for a script that passes its arguments on to a program that it builds: PROGRAM and its ARGUMENTs before --help. The
# program's options follow the description if the program has been built.
help_of_program() { # PROGRAM [ARGUMENT...] -- "$@"
    local command=() program
    while [ "$1" != -- ]; do
        command+=("$1")
        shift
    done
    case ${2:-} in --help | -h) ;; *) return 0 ;; esac
    describe
    program=${CARGO_TARGET_DIR:-target}/release/${command[0]}
    echo
    if [ -x "$program" ]; then
        "$program" "${command[@]:1}" --help
    else
        echo "The options are those of '$program ${command[*]:1}--help', which this script builds."
    fi
    exit 0
}

usage() {
    describe >&2
    exit 2
}

need_root() {
    if [ "$(id -u)" -ne 0 ]; then
        echo "$0: needs root (network namespaces, XDP, packages): try 'sudo $0'" >&2
        exit 1
    fi
}

# The oldest Rust that builds this workspace.
rust_needed() {
    sed -n 's/^rust-version = "\(.*\)"/\1/p' "$(dirname "${BASH_SOURCE[0]}")/../Cargo.toml" | head -1
}

# Whether DIRECTORY has cargo and rustc that are new enough. OLD_RUST names those that are not.
rust_is_new() { # directory
    local program version
    for program in cargo rustc; do
        [ -x "$1/$program" ] || return 1
        # rustup's links work only if a toolchain is installed.
        version=$("$1/$program" --version 2>/dev/null | cut -d' ' -f2)
        if [ -z "$version" ] || ! printf '%s\n' "$(rust_needed)" "$version" | sort -VC; then
            OLD_RUST="$1/$program ${version:-without a toolchain}"
            return 1
        fi
    done
}

# Puts a toolchain on the PATH that is there and new enough: one on the PATH, one of rustup (root's own, or that of the user who called
# sudo), or Debian's.
use_rust() {
    local directory home
    directory=$(command -v cargo) && rust_is_new "$(dirname "$directory")" && return
    for home in "${HOME:-/root}" "$(getent passwd "${SUDO_USER:-}" | cut -d: -f6)"; do
        [ -n "$home" ] && [ -x "$home/.cargo/bin/cargo" ] || continue
        if RUSTUP_HOME=${RUSTUP_HOME:-$home/.rustup} rust_is_new "$home/.cargo/bin"; then
            export RUSTUP_HOME=${RUSTUP_HOME:-$home/.rustup} PATH=$home/.cargo/bin:$PATH
            return
        fi
    done
    rust_is_new /usr/bin && export PATH=/usr/bin:$PATH
}

# The suffix of Debian's packages of Rust that are new enough: none, or "-web" for those that Debian keeps new for its browsers.
rust_suffix() {
    local suffix package version
    for suffix in '' -web; do
        for package in cargo rustc; do
            version=$(LC_ALL=C apt-cache policy "$package$suffix" 2>/dev/null | sed -n 's/^ *Candidate: //p')
            [ -n "$version" ] && dpkg --compare-versions "$version" ge "$(rust_needed)" || continue 2
        done
        echo "$suffix"
        return
    done
    return 1
}

is_installed() { # package
    dpkg-query -W -f '${Status}' "$1" 2>/dev/null | grep -q 'ok installed'
}

# Finds a toolchain of Rust, or installs Debian's. PACKAGE... are further packages of it, such as rustfmt; the checks of a too old
# one come before anything is installed or built.
need_rust() { # package...
    local suffix package missing=() needed
    needed=$(rust_needed)
    OLD_RUST=
    if ! use_rust; then
        local found=${OLD_RUST:+ (found: $OLD_RUST)}
        # Debian's packages of cargo would replace its rustup.
        if is_installed rustup; then
            echo "$0: needs Rust $needed or newer$found: 'rustup default stable' installs it" >&2
            exit 1
        fi
        suffix=$(rust_suffix) || { apt_update && suffix=$(rust_suffix); } || {
            echo "$0: needs Rust $needed or newer$found, and no Debian package here has it: install it by rustup" >&2
            exit 1
        }
        [ -z "$OLD_RUST" ] || echo "too old for this workspace, which needs Rust $needed: $OLD_RUST"
        install_needs "cargo$suffix" "rustc$suffix"
        use_rust || { echo "$0: needs Rust $needed or newer; cargo$suffix has none (found: ${OLD_RUST:-none})" >&2; exit 1; }
    fi
    for package in "$@"; do
        case $package in
            rustfmt) cargo fmt --version >/dev/null 2>&1 || missing+=(rustfmt) ;;
            clippy) cargo clippy --version >/dev/null 2>&1 || missing+=(clippy) ;;
        esac
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    if command -v rustup >/dev/null; then
        rustup component add "${missing[@]}"
    else
        if is_installed cargo-web; then suffix=-web; else suffix=; fi
        # The packages are called rustfmt and rust-clippy, rustfmt-web and rust-web-clippy.
        missing=("${missing[@]/#rustfmt/rustfmt$suffix}")
        install_needs "${missing[@]/#clippy/rust${suffix}-clippy}"
    fi
}

# Finds a toolchain that is there; for scripts that run without root.
need_cargo() {
    OLD_RUST=
    use_rust || {
        echo "$0: needs Rust $(rust_needed) or newer${OLD_RUST:+ (found: $OLD_RUST)}: 'sudo ci/install build' installs it" >&2
        exit 1
    }
}

apt_update() {
    [ -z "${APT_UPDATED:-}" ] || return 0
    command -v apt-get >/dev/null && [ "$(id -u)" -eq 0 ] || return 1
    apt-get update -qq && APT_UPDATED=yes
}

install_needs() {
    local package missing=()
    for package in "$@"; do
        is_installed "$package" || missing+=("$package")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    if ! command -v apt-get >/dev/null; then
        echo "$0: installs Debian's packages only; this system needs what these have: ${missing[*]}" >&2
        exit 1
    fi
    if [ "$(id -u)" -ne 0 ]; then
        echo "$0: missing packages; as root: apt-get install ${missing[*]}" >&2
        exit 1
    fi
    echo "installing: ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt_update
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}
