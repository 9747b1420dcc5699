#!/bin/bash
# The interfaces, their queues and what stands on them.

# The client's interface is down for 2 s.
# quick
# seconds: 9
link_down_client() {
    a ip link set "$X" down
    sleep 2
    a ip link set "$X" up
    a ip addr replace fd77::1/64 dev "$X" nodad
    a ip route replace 10.79.0.9/32 via 10.77.0.2
}

# The server's interface is down for 2 s.
# seconds: 9
link_down_server() {
    b ip link set "$X" down
    sleep 2
    b ip link set "$X" up
    b ip addr replace fd77::2/64 dev "$X" nodad
}

# The server's interface is down for 8 s.
# seconds: 24
link_down_long() {
    b ip link set "$X" down
    sleep 8
    b ip link set "$X" up
    b ip addr replace fd77::2/64 dev "$X" nodad
}

# The client's interface goes down and up ten times within 2 s.
# seconds: 9
link_flaps() {
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        a ip link set "$X" down
        sleep 0.1
        a ip link set "$X" up
        sleep 0.1
    done
    a ip addr replace fd77::1/64 dev "$X" nodad
}

# The MTU of both ends falls to 1280, and rises again.
# quick
# seconds: 9
link_mtu() {
    both ip link set "$X" mtu 1280
    sleep 2
    both ip link set "$X" mtu 1500
}

# The MTU of the client's end falls to 1280.
link_mtu_client() { a ip link set "$X" mtu 1280; }

# The MTU of the server's end falls to 1280 while the client's stays.
# seconds: 12
link_mtu_server() { b ip link set "$X" mtu 1280; }

# The MTU of both ends rises to 3000.
link_mtu_rises() { both ip link set "$X" mtu 3000; }

# The interface becomes promiscuous and not again.
link_promiscuous() {
    a ip link set "$X" promisc on allmulticast on
    sleep 1
    a ip link set "$X" promisc off allmulticast off
}

# The interface gets an alternative name, an alias and a group.
link_names() {
    a ip link property add dev "$X" altname uplink0
    a ip link set "$X" alias uplink
    a ip link set "$X" group 7
}

# The interface is renamed.
# seconds: 8
link_renamed() {
    a ip link set "$X" name renamed
}

# Checksum, segmentation and receive offloads are switched off and on.
link_offloads() {
    for to in off on; do
        both ethtool -K "$X" tx "$to" tso "$to" gso "$to" gro "$to" || true
        sleep 1
    done
}

# Queues are added: from one to four.
# quick
# worse shared: in native mode, the driver of veth runs no program on them until xwarpd has it do so, within half a second
# queues: 4
# seconds: 8
link_queues_added() {
    both ethtool -L "$X" rx 4
    both ethtool -L "$X" tx 4
}

# A queueing discipline that limits the rate is set at the client.
link_qdisc() { a tc qdisc replace dev "$X" root pfifo limit 100; }

# A macvlan interface is created on the client's interface and removed.
link_macvlan() {
    a ip link add upper link "$X" type macvlan mode bridge
    a ip link set upper up
    sleep 1
    a ip link del upper
}

# A VLAN interface is created on the client's interface and removed.
link_vlan() {
    a ip link add upper link "$X" type vlan id 7
    a ip link set upper up
    sleep 1
    a ip link del upper
}

# The client's interface is set down and up with its group.
# seconds: 9
link_group() {
    a ip link set "$X" group 7
    a ip link set group 7 down
    sleep 1
    a ip link set group 7 up
    a ip addr replace fd77::1/64 dev "$X" nodad
}

# The client's interface becomes a port of a bridge, which takes over the addresses and routes, for 3 s.
# quick
# seconds: 12
link_bridge() {
    a ip link add bridge type bridge
    a ip link set bridge up
    a ip addr del 10.77.0.1/24 dev "$X"
    a ip addr del fd77::1/64 dev "$X"
    a ip link set "$X" master bridge
    a ip addr add 10.77.0.1/24 dev bridge
    a ip addr add fd77::1/64 dev bridge nodad
    sleep 3
    a ip link set "$X" nomaster
    a ip link del bridge
    a ip addr add 10.77.0.1/24 dev "$X"
    a ip addr add fd77::1/64 dev "$X" nodad
}

# The client's interface becomes part of a VRF for 2 s.
# seconds: 12
link_vrf() {
    a ip link add red type vrf table 77
    a ip link set red up
    a ip link set "$X" master red
    sleep 2
    a ip link set "$X" nomaster
    a ip addr replace fd77::1/64 dev "$X" nodad
}

# Somebody tries to take the XDP program away.
link_xdp_off() {
    both ip link set dev "$X" xdp off || true
    both ip link set dev "$X" xdpgeneric off || true
}

# A packet socket listens, as tcpdump does.
link_tcpdump() { a timeout 2 tcpdump -ni "$X" -c 5 tcp || true; }
