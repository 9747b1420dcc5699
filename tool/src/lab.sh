#!/bin/bash
# Creates and removes a lab: two network namespaces joined by a veth pair. 'xwarp lab' contains this script and ci/lab calls it;
# both describe it to their users.
#
#     COMMAND is up, down, exec or show; XWARP_LAB_CALLER names the caller in messages.
#
# Needs root (CAP_NET_ADMIN and CAP_SYS_ADMIN) and iproute2; ethtool for --offloads and --hop.
set -euo pipefail
caller=${XWARP_LAB_CALLER:-xwarp lab}

usage() {
    echo "$caller: wrong arguments; see '$caller --help'" >&2
    exit 2
}

prefix=xw
if [ "${1:-}" = --name ]; then
    prefix=${2:?"--name needs a prefix"}
    shift 2
fi
command=${1:-}
[ -n "$command" ] || usage
shift

need_root() {
    need ip iproute2
    if [ "$(id -u)" -ne 0 ]; then
        echo "$caller: network namespaces need root: try 'sudo $caller $command'" >&2
        exit 1
    fi
}

# Sets variables of the kernel in one namespace. By `sysctl` there would be a need for procps, which minimal systems lack.
sysctl() { # namespace name=value...
    local namespace=$1 each path
    shift
    for each in "$@"; do
        path=/proc/sys/$(echo "${each%%=*}" | tr . /)
        ip netns exec "$namespace" sh -c 'echo "$1" >"$0"' "$path" "${each#*=}"
    done
}

need() { # program package
    if ! command -v "$1" >/dev/null; then
        echo "$caller: there is no program '$1': install $2" >&2
        exit 1
    fi
}

address() { # a|b base-v4 base-v6 interface
    local host=1
    [ "$1" = a ] || host=2
    ip -n "$prefix-$1" addr add "$2.$host/24" dev "$4"
    ip -n "$prefix-$1" addr add "$3::$host/64" dev "$4" nodad
    ip -n "$prefix-$1" link set "$4" up
}

# The kernel reports the carrier of a new veth some milliseconds late, separately for each end.
wait_up() {
    local tries
    for tries in $(seq 200); do
        if ip -n "$prefix-$1" -o link show dev "$2" | grep -q 'state UP'; then
            return
        fi
        sleep 0.01
    done
    echo "$caller: $2 in $prefix-$1 did not come up" >&2
    return 1
}

# Also kills the processes inside, because an interface lives as long as a process uses its namespace.
down() {
    local side pids
    for side in a b hop; do
        [ -e "/run/netns/$prefix-$side" ] || continue
        pids=$(ip netns pids "$prefix-$side" 2>/dev/null || true)
        # shellcheck disable=SC2086
        [ -z "$pids" ] || kill -KILL $pids 2>/dev/null || true
        ip netns del "$prefix-$side" 2>/dev/null || true
    done
}

cable() { # interface namespace interface namespace; mtu and queues as up() has them
    ip link add "$1" netns "$2" mtu "$mtu" numrxqueues "$queues" numtxqueues "$queues" type veth \
        peer name "$3" netns "$4" mtu "$mtu" numrxqueues "$queues" numtxqueues "$queues"
}

up() {
    local mtu='' queues=1 vlan='' offloads=on hop=''
    while [ $# -gt 0 ]; do
        case $1 in
            --hop)
                hop=yes
                shift
                continue
                ;;
            --mtu) mtu=$2 ;;
            --queues) queues=$2 ;;
            --vlan) vlan=$2 ;;
            --offloads) offloads=$2 ;;
            *) usage ;;
        esac
        shift 2
    done
    [ -n "$mtu" ] || if [ -n "$hop" ]; then mtu=1500; else mtu=65535; fi
    if [ -n "$hop" ] && [ -n "$vlan" ]; then
        echo "$caller: VLAN tags do not pass the hop" >&2
        return 2
    fi
    [ "$offloads$hop" = on ] || need ethtool ethtool
    down
    trap down EXIT
    local side
    for side in a b; do
        ip netns add "$prefix-$side"
        sysctl "$prefix-$side" net.ipv6.conf.all.accept_dad=0 net.ipv6.conf.default.accept_dad=0
        ip -n "$prefix-$side" link set lo up
    done
    if [ -n "$hop" ]; then
        offloads=none
        ip netns add "$prefix-hop"
        # The hop's own kernel must not send anything.
        sysctl "$prefix-hop" net.ipv6.conf.all.disable_ipv6=1 net.ipv6.conf.default.disable_ipv6=1
        for side in a b; do
            cable xw0 "$prefix-$side" "x$side" "$prefix-hop"
            ip netns exec "$prefix-hop" ethtool -K "x$side" tx off tso off gso off gro off
            ip -n "$prefix-hop" link set "x$side" up
        done
    else
        cable xw0 "$prefix-a" xw0 "$prefix-b"
    fi
    for side in a b; do
        address "$side" 10.77.0 fd77 xw0
        case $offloads in
            off) ip netns exec "$prefix-$side" ethtool -K xw0 tso off gso off gro off ;;
            none) ip netns exec "$prefix-$side" ethtool -K xw0 tx off tso off gso off gro off ;;
        esac
        if [ -n "$vlan" ]; then
            if ! ip -n "$prefix-$side" link add link xw0 name "xw0.$vlan" type vlan id "$vlan"; then
                echo "$caller: this kernel has no 802.1Q interfaces (CONFIG_VLAN_8021Q)" >&2
                return 3
            fi
            address "$side" 10.78.0 fd78 "xw0.$vlan"
        fi
    done
    for side in a b; do
        wait_up "$side" xw0
        [ -z "$hop" ] || wait_up hop "x$side"
    done
    trap - EXIT
}

case $command in
    up)
        need_root
        up "$@"
        ;;
    down)
        need_root
        down
        ;;
    exec)
        need_root
        side=${1:-}
        case $side in a | b | hop) ;; *) usage ;; esac
        shift
        [ $# -gt 0 ] || usage
        if [ ! -e "/run/netns/$prefix-$side" ]; then
            echo "$caller: there is no lab with this side: '$caller up' makes one" >&2
            exit 1
        fi
        # The shell's statuses: 126 for a program that cannot be run, 127 for one that is not found.
        # shellcheck disable=SC2016
        exec ip netns exec "$prefix-$side" sh -c 'exec "$@"' "$caller" "$@"
        ;;
    show)
        for side in a b hop; do
            [ -e "/run/netns/$prefix-$side" ] || continue
            need_root
            echo "$prefix-$side:"
            ip -n "$prefix-$side" -brief addr
        done
        ;;
    *) usage ;;
esac
