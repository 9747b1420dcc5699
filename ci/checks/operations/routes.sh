#!/bin/bash
# Routes, rules and next hops of the client, and the path beyond.

# The client's routes to the server are blackholes for 3 s.
# quick
# seconds: 8
route_blackhole() { route_to_b a 3 blackhole; }

# The client's routes to the server are unreachable for 3 s.
# seconds: 8
route_unreachable() { route_to_b a 3 unreachable; }

# The client's routes to the server are prohibited for 3 s.
# seconds: 8
route_prohibit() { route_to_b a 3 prohibit; }

# The client's routes to the server throw it to the next table, which has none, for 3 s.
# seconds: 8
route_throw() { route_to_b a 3 throw; }

# The default routes are gone for 3 s.
# network: routed
# quick
# seconds: 8
route_default_gone() {
    a ip route del default
    a ip -6 route del default
    sleep 3
    a ip route add default via 10.78.0.254
    a ip route add default via fd78::fe
}

# The server's routes to the client are gone for 3 s.
# network: routed
# seconds: 8
route_back_gone() {
    b ip route del 10.78.0.0/24
    b ip route del fd78::/64
    sleep 3
    b ip route add 10.78.0.0/24 via 10.77.0.254
    b ip route add fd78::/64 via fd77::fe
}

# The routes of the connected prefixes are gone for 3 s.
# seconds: 8
route_connected_gone() {
    a ip route del 10.77.0.0/24
    a ip route del fd77::/64
    sleep 3
    a ip route add 10.77.0.0/24 dev "$X" src 10.77.0.1
    a ip route add fd77::/64 dev "$X"
}

# A host route by the same interface is added and removed.
route_host() {
    a ip route add 10.77.0.2/32 dev "$X"
    a ip route add fd77::2/128 dev "$X"
    sleep 1
    a ip route del 10.77.0.2/32 dev "$X"
    a ip route del fd77::2/128 dev "$X"
}

# A route to the server has the MTU 1000; later it is removed.
route_mtu() {
    a ip route add 10.77.0.2/32 dev "$X" mtu 1000
    a ip route add fd77::2/128 dev "$X" mtu 1300
    sleep 2
    a ip route del 10.77.0.2/32 dev "$X"
    a ip route del fd77::2/128 dev "$X"
}

# A route to the server has the locked MTU 1000.
route_mtu_locked() {
    a ip route add 10.77.0.2/32 dev "$X" mtu lock 1000
    sleep 2
    a ip route del 10.77.0.2/32 dev "$X"
}

# A route to the server has other metrics: advmss, initcwnd, initrwnd, hoplimit, quickack, rto_min.
route_metrics() {
    a ip route add 10.77.0.2/32 dev "$X" advmss 500 initcwnd 2 initrwnd 4 hoplimit 9 quickack 1 rto_min 300ms
    a ip route add fd77::2/128 dev "$X" advmss 500 initcwnd 2 initrwnd 4 hoplimit 9 quickack 1 rto_min 300ms
}

# A better route by another interface, which leads nowhere, is added and removed.
# worse: a device stays on its interface if that has a route, as a socket that is bound to it
# seconds: 10
route_better_metric() {
    a ip link add nowhere type veth peer name nowhere0
    a ip link set nowhere0 up
    a ip link set nowhere up
    route_to_b a 2 unicast dev nowhere
}

# The other interface that a better route leads to is removed.
# worse: a device stays on its interface if that has a route, as a socket that is bound to it
# seconds: 10
route_interface_removed() {
    a ip link add nowhere type veth peer name nowhere0
    a ip link set nowhere0 up
    a ip link set nowhere up
    a ip route add 10.77.0.2/32 dev nowhere
    a ip route add fd77::2/128 dev nowhere metric 1
    sleep 2
    a ip link del nowhere
}

# A default route is added beside the route of the prefix.
route_default_added() {
    a ip route add default via 10.77.0.2
    a ip route add default via fd77::2
}

# The server is reached by a gateway of the other family.
route_via_ipv6() { a ip route add 10.77.0.2/32 via inet6 fd77::2 dev "$X"; }

# Routes name a gateway that is "on link", and a preferred source.
route_source() {
    a ip route add 10.77.0.2/32 via 10.77.0.2 dev "$X" onlink src 10.77.0.1
    a ip route add fd77::2/128 via fd77::2 dev "$X" onlink src fd77::1
}

# A rule ignores routes of the main table that are shorter than /25, for 3 s.
# seconds: 8
rule_suppress() {
    rules add priority 100 table main suppress_prefixlength 120
    rules del priority 32766 table main
    sleep 3
    rules del priority 100 table main suppress_prefixlength 120
    rules add priority 32766 table main
}

# A rule from the client's prefix leads to a table of the same routes.
# quick
rule_from() {
    a ip route add 10.77.0.0/24 dev "$X" table 100
    a ip route add fd77::/64 dev "$X" table 100
    a ip rule add from 10.77.0.0/24 table 100
    a ip -6 rule add from fd77::/64 table 100
}

# A rule from the client's prefix leads to a blackhole for 3 s.
# seconds: 8
rule_blackhole() {
    a ip rule add from 10.77.0.0/24 blackhole
    a ip -6 rule add from fd77::/64 blackhole
    sleep 3
    a ip rule del from 10.77.0.0/24 blackhole
    a ip -6 rule del from fd77::/64 blackhole
}

# A rule for the ports of the servers forbids for 3 s.
# quick
# seconds: 8
rule_port() {
    rules add ipproto tcp dport 4790-4793 prohibit
    sleep 3
    rules del ipproto tcp dport 4790-4793 prohibit
}

# A rule for another port forbids.
rule_other_port() { rules add ipproto tcp dport 80 prohibit; }

# A rule for root's sockets forbids for 3 s.
# seconds: 8
rule_user() {
    rules add uidrange 0-0 prohibit
    sleep 3
    rules del uidrange 0-0 prohibit
}

# A rule for marked packets forbids.
rule_mark() { rules add fwmark 7 prohibit; }

# The rule of the main table is moved behind others.
rule_main_moved() {
    rules add priority 40000 table main
    rules del priority 32766 table main
}

# The routes use next hop objects, which change to a blackhole for 3 s.
# network: routed
# seconds: 10
nexthop_blackhole() {
    a ip nexthop add id 1 via 10.78.0.254 dev "$X"
    a ip nexthop add id 2 via fd78::fe dev "$X"
    a ip route replace default nhid 1
    a ip -6 route replace default nhid 2
    sleep 1
    a ip nexthop replace id 1 blackhole
    a ip -6 nexthop replace id 2 blackhole
    sleep 3
    a ip nexthop replace id 1 via 10.78.0.254 dev "$X"
    a ip nexthop replace id 2 via fd78::fe dev "$X"
}

# The routes use a group of two next hop objects, of which one is removed.
# network: routed
# seconds: 8
nexthop_group() {
    hop ip addr add 10.78.0.253/24 dev "$HOP_A"
    hop ip addr add fd78::fd/64 dev "$HOP_A" nodad
    a ip nexthop add id 1 via 10.78.0.254 dev "$X"
    a ip nexthop add id 2 via 10.78.0.253 dev "$X"
    a ip nexthop add id 3 group 1/2
    a ip nexthop add id 4 via fd78::fe dev "$X"
    a ip nexthop add id 5 via fd78::fd dev "$X"
    a ip nexthop add id 6 group 4/5
    a ip route replace default nhid 3
    a ip -6 route replace default nhid 6
    sleep 1
    a ip nexthop del id 1
    a ip nexthop del id 4
}

# The default route has two gateways (ECMP), of which one stops to answer ARP and is removed after 2 s.
# network: routed
# seconds: 10
route_two_gateways() {
    hop ip addr add 10.78.0.253/24 dev "$HOP_A"
    hop ip addr add fd78::fd/64 dev "$HOP_A" nodad
    a ip route replace default nexthop via 10.78.0.254 nexthop via 10.78.0.253
    a ip -6 route replace default nexthop via fd78::fe nexthop via fd78::fd
    sleep 2
    a ip route replace default via 10.78.0.253
    a ip -6 route replace default via fd78::fd
}

# Two thousand other routes are added and removed.
# seconds: 10
route_thousands() {
    for i in $(seq 0 7); do
        for j in $(seq 0 249); do
            echo "route add 10.99.$i.$j/32 via 10.77.0.2"
        done
    done > "$SCRATCH/batch"
    a ip -batch "$SCRATCH/batch"
    sed -i 's/ add / del /' "$SCRATCH/batch"
    a ip -batch "$SCRATCH/batch"
}

# All routes are flushed and restored.
# network: routed
route_flushed() {
    a ip route save > "$SCRATCH/routes"
    a ip route flush table main
    a ip route restore < "$SCRATCH/routes" || true
    a ip route replace 10.78.0.0/24 dev "$X" src 10.78.0.1
    a ip route replace default via 10.78.0.254
}

# The path's MTU falls to 1280 behind the router, which says so.
# network: routed
# quick
# seconds: 8
path_mtu_falls() {
    hop ip link set "$HOP_B" mtu 1280
    b ip link set "$X" mtu 1280
}

# The path's MTU falls to 1280 behind the router for what comes back, in silence.
# network: routed
# seconds: 8
path_mtu_black_hole() { hop ip link set "$HOP_B" mtu 1280; }

# The router says "administratively prohibited" for 3 s.
# network: routed
# seconds: 8
path_prohibited() { route_to_b hop 3 prohibit; }

# The router has no route for 3 s and says so.
# network: routed
# quick
# seconds: 8
path_unreachable() { route_to_b hop 3 unreachable; }

# The router drops everything for 3 s, in silence.
# network: routed
# seconds: 10
path_silent() {
    hop sysctl -qw net.ipv4.ip_forward=0 net.ipv6.conf.all.forwarding=0
    sleep 3
    hop sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1
}

# The router's second interface is down for 3 s.
# network: routed
# seconds: 10
path_down() {
    hop ip link set "$HOP_B" down
    sleep 3
    hop ip link set "$HOP_B" up
    hop ip addr replace fd77::fe/64 dev "$HOP_B" nodad
}
