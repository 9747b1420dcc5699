#!/bin/bash
# What the operations use: the namespaces of a lab as commands, the two networks, and short words.

a() { ip netns exec "$LAB_A" "$@"; }
b() { ip netns exec "$LAB_B" "$@"; }
hop() { ip netns exec "$LAB_HOP" "$@"; }
both() { a "$@"; b "$@"; }

# a and b on a cable, with one queue: 10.77.0.1 and fd77::1, 10.77.0.2 and fd77::2. b has also .3 and ::3, and 10.79.0.9 and fd79::9 on its loopback interface.
direct() {
    both ip link set lo up
    both ethtool -L "$X" rx 1 tx 1 || true
    both sysctl -qw net.ipv6.conf."$X".accept_dad=0
    b ip addr add 10.77.0.3/24 dev "$X"
    b ip addr add fd77::3/64 dev "$X" nodad
    b ip addr add 10.79.0.9/32 dev lo
    b ip addr add fd79::9/128 dev lo
    a ip route add 10.79.0.9/32 via 10.77.0.2
    a ip route add fd79::9/128 via fd77::2
}

# a at a router, which b is also at: a becomes 10.78.0.1 and fd78::1; the router is .254 and ::fe on both sides.
routed() {
    direct
    a ip addr flush dev "$X" scope global
    a ip addr add 10.78.0.1/24 dev "$X"
    a ip addr add fd78::1/64 dev "$X" nodad
    hop sysctl -qw net.ipv6.conf."$HOP_A".disable_ipv6=0 net.ipv6.conf."$HOP_B".disable_ipv6=0
    hop sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1 net.ipv6.conf.all.accept_dad=0
    hop ip addr add 10.78.0.254/24 dev "$HOP_A"
    hop ip addr add fd78::fe/64 dev "$HOP_A" nodad
    hop ip addr add 10.77.0.254/24 dev "$HOP_B"
    hop ip addr add fd77::fe/64 dev "$HOP_B" nodad
    a ip route add default via 10.78.0.254
    a ip route add default via fd78::fe
    b ip route add 10.78.0.0/24 via 10.77.0.254
    b ip route add fd78::/64 via fd77::fe
}

# route_to_b a|hop SECONDS WORDS...: routes to b are of this kind for a time, with more words.
route_to_b() {
    local at=$1 seconds=$2 kind=$3
    shift 3
    "$at" ip route add "$kind" 10.77.0.2/32 "$@"
    "$at" ip route add "$kind" fd77::2/128 "$@" metric 1
    sleep "$seconds"
    "$at" ip route del "$kind" 10.77.0.2/32 "$@"
    "$at" ip route del "$kind" fd77::2/128 "$@" metric 1
}

# addresses_gone a|b SECONDS: the addresses of this host are gone for a time.
addresses_gone() {
    local host=1
    [ "$1" = a ] || host=2
    "$1" ip addr del 10.77.0.$host/24 dev "$X"
    "$1" ip addr del fd77::$host/64 dev "$X"
    sleep "$2"
    "$1" ip addr add 10.77.0.$host/24 dev "$X"
    "$1" ip addr add fd77::$host/64 dev "$X" nodad
}

# The router gets an empty chain for what it forwards: inet f c.
filter_router() {
    hop nft add table inet f
    hop nft 'add chain inet f c { type filter hook forward priority 0; }'
}

# rules add|del WORDS...: a rule of a in both families.
rules() {
    local action=$1
    shift
    a ip rule "$action" "$@"
    a ip -6 rule "$action" "$@"
}
