# Sourced by the scripts beside it. `install_needs PACKAGE...` installs the missing ones of these Debian
# packages; when nothing is missing it does not use the network.

# Packages for building: the crates compile libbpf and libelf from source.
BUILD_PACKAGES=(clang llvm libelf-dev zlib1g-dev pkg-config make gcc libc6-dev libc6-dev-i386)
# Packages for the lab and for the checks of captures.
TEST_PACKAGES=(iproute2 ethtool procps iputils-ping iperf3 tshark)
# Programs that run unchanged over SDP. Debian has no netperf.
TEST_PACKAGES+=(netcat-openbsd socat curl python3 redis-server memcached nginx-light apache2-utils wrk sockperf openssh-server postgresql)
# Libraries of programs that the tests build and run over SDP. asio is boost.asio without the rest of Boost.
TEST_PACKAGES+=(libevent-dev libuv1-dev libasio-dev g++)
# RDMA programs that run over the drop-in libraries, and the headers whose structures those are compared with.
TEST_PACKAGES+=(ibverbs-utils rdmacm-utils perftest qperf libfabric-bin libibverbs-dev librdmacm-dev)

need_root() {
    if [ "$(id -u)" -ne 0 ]; then
        echo "$0: needs root (network namespaces, XDP, packages): try 'sudo $0'" >&2
        exit 1
    fi
}

need_cargo() {
    if ! command -v cargo >/dev/null && [ -f "${HOME:-/root}/.cargo/env" ]; then
        # shellcheck source=/dev/null
        . "${HOME:-/root}/.cargo/env"
    fi
    if ! command -v cargo >/dev/null; then
        echo "$0: no cargo found: install Rust first, 1.95 or newer" >&2
        exit 1
    fi
}

install_needs() {
    local package missing=()
    for package in "$@"; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
    done
    [ ${#missing[@]} -eq 0 ] && return
    echo "installing: ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}
