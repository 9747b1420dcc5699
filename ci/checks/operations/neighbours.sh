#!/bin/bash
# Neighbours and Ethernet addresses.

# The client's neighbours are flushed, five times.
neighbour_flushed() {
    for _ in 1 2 3 4 5; do
        a ip neigh flush dev "$X"
        sleep 0.3
    done
}

# The server's Ethernet address is permanent at the client.
neighbour_permanent() {
    mac=$(b cat /sys/class/net/"$X"/address)
    a ip neigh replace 10.77.0.2 lladdr "$mac" dev "$X" nud permanent
    a ip neigh replace fd77::2 lladdr "$mac" dev "$X" nud permanent
}

# The client has a wrong Ethernet address of the server for 3 s.
# quick
# seconds: 9
neighbour_wrong() {
    mac=$(b cat /sys/class/net/"$X"/address)
    a ip neigh replace 10.77.0.2 lladdr 02:00:00:00:99:99 dev "$X" nud permanent
    a ip neigh replace fd77::2 lladdr 02:00:00:00:99:99 dev "$X" nud permanent
    sleep 3
    a ip neigh replace 10.77.0.2 lladdr "$mac" dev "$X" nud reachable
    a ip neigh replace fd77::2 lladdr "$mac" dev "$X" nud reachable
}

# The client's entries are set to failed.
neighbour_failed() {
    a ip neigh change 10.77.0.2 dev "$X" nud failed || true
    a ip neigh change fd77::2 dev "$X" nud failed || true
}

# The server gets another Ethernet address, and announces it.
# seconds: 10
neighbour_announced() {
    b ip link set "$X" address 02:00:00:00:77:99
    b ping -qc1 -W2 10.77.0.1
    b ping -qc1 -W2 fd77::1
    a ip neigh flush dev "$X"
}

# The server gets another Ethernet address, and says nothing.
# seconds: 30
neighbour_silent() {
    b ip link set "$X" address 02:00:00:00:77:98
}

# The client gets another Ethernet address, and says nothing.
# seconds: 30
neighbour_own() {
    a ip link set "$X" address 02:00:00:00:77:97
}

# A virtual router's address moves to another Ethernet address, without an announcement.
# network: routed
# seconds: 30
neighbour_router_moves() {
    hop ip link add second link "$HOP_A" type macvlan mode bridge
    hop ip link set second up
    hop sysctl -qw net.ipv6.conf.second.disable_ipv6=0
    hop sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf."$HOP_A".rp_filter=0
    hop ip addr del 10.78.0.254/24 dev "$HOP_A"
    hop ip addr del fd78::fe/64 dev "$HOP_A"
    hop ip addr add 10.78.0.254/24 dev second
    hop ip addr add fd78::fe/64 dev second nodad
}

# The client's entries are deleted, five times.
neighbour_deleted() {
    for _ in 1 2 3 4 5; do
        a ip neigh del 10.77.0.2 dev "$X" || true
        a ip neigh del fd77::2 dev "$X" || true
        sleep 0.3
    done
}

# The client's interface does without ARP for 2 s.
# worse: the Ethernet address that is known is kept, while the kernel sends its frames to nobody
# seconds: 10
neighbour_no_arp() {
    a ip link set "$X" arp off
    sleep 2
    a ip link set "$X" arp on
}

# Neighbours become stale after a second, and are confirmed.
# seconds: 12
neighbour_stale() {
    a sysctl -qw net.ipv4.neigh."$X".base_reachable_time_ms=1000 net.ipv4.neigh."$X".delay_first_probe_time=1
    a sysctl -qw net.ipv6.neigh."$X".base_reachable_time_ms=1000 net.ipv6.neigh."$X".delay_first_probe_time=1
    a ip neigh flush dev "$X"
}

# The table of neighbours overflows with two thousand others.
# seconds: 8
neighbour_thousands() {
    for i in $(seq 1 8); do
        for j in $(seq 1 250); do
            echo "neigh replace 10.77.$i.$j lladdr 02:00:00:00:$(printf %02x:%02x "$i" "$j") dev $X nud stale"
        done
    done > "$SCRATCH/batch"
    a ip -force -batch "$SCRATCH/batch" || true
}
