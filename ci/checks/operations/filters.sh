#!/bin/bash
# Packet filters and policies, on the hosts and on the router.

# The router drops both directions for 3 s.
# network: routed
# quick
# seconds: 10
filter_router_drops() {
    hop nft add table inet f
    hop nft 'add chain inet f c { type filter hook forward priority 0; policy drop; }'
    sleep 3
    hop nft flush ruleset
}

# The router answers everything with "port unreachable" for 3 s.
# network: routed
# seconds: 10
filter_router_rejects() {
    filter_router
    hop nft add rule inet f c meta l4proto tcp reject
    sleep 3
    hop nft flush ruleset
}

# The router resets every connection once.
# network: routed
filter_router_resets() {
    filter_router
    hop nft add rule inet f c meta l4proto tcp reject with tcp reset
    sleep 1
    hop nft flush ruleset
}

# The router drops a random quarter of the packets for 3 s.
# network: routed
# seconds: 10
# worse: after repaired losses of single segments the window of an application that sends little is two segments, the kernel's 0.7 of what it was
filter_router_loses() {
    filter_router
    hop nft add rule inet f c numgen random mod 4 == 0 drop
    sleep 3
    hop nft flush ruleset
}

# The router marks every packet with Congestion Experienced for 3 s.
# network: routed
# quick
# seconds: 8
filter_router_marks() {
    filter_router
    hop nft add rule inet f c ip ecn ect0 ip ecn set ce
    hop nft add rule inet f c ip6 ecn ect0 ip6 ecn set ce
    sleep 3
    hop nft flush ruleset
}

# The router clears the ECN field of every packet.
# network: routed
filter_router_clears_ecn() {
    filter_router
    hop nft add rule inet f c ip ecn set not-ect
    hop nft add rule inet f c ip6 ecn set not-ect
}

# The router changes the DSCP of every packet.
# network: routed
filter_router_dscp() {
    filter_router
    hop nft add rule inet f c ip dscp set cs1
    hop nft add rule inet f c ip6 dscp set cs1
}

# The router clamps the MSS of new connections to 600.
# network: routed
filter_router_clamps() {
    filter_router
    hop nft add rule inet f c tcp flags syn tcp option maxseg size set 600
}

# The router translates the client's address of new connections.
# network: routed
filter_router_masquerades() {
    hop nft add table inet f
    hop nft 'add chain inet f c { type nat hook postrouting priority 100; }'
    hop nft add rule inet f c oifname "$HOP_B" masquerade
}

# The router follows connections, and drops what it calls invalid.
# network: routed
filter_router_follows() {
    filter_router
    hop nft add rule inet f c ct state invalid drop
}

# The client's own filter drops what arrives for 3 s.
# worse: frames of a device do not pass through the host's filters (docs/operation.md)
# seconds: 8
filter_host_input() {
    a nft add table inet f
    a nft 'add chain inet f c { type filter hook input priority 0; policy drop; }'
    sleep 3
    a nft flush ruleset
}

# A policy demands IPsec at the client for 3 s, and there is none.
# quick
# seconds: 9
policy_ipsec() {
    for direction in in out; do
        a ip xfrm policy add dir "$direction" src 10.77.0.0/24 dst 10.77.0.0/24 tmpl proto esp mode transport
        a ip xfrm policy add dir "$direction" src fd77::/64 dst fd77::/64 tmpl proto esp mode transport
    done
    sleep 3
    a ip xfrm policy flush
}

# The system's settings of TCP change: no timestamps, no SACK, no window scaling, ECN.
filter_sysctls() {
    both sysctl -qw net.ipv4.tcp_timestamps=0 net.ipv4.tcp_sack=0 net.ipv4.tcp_window_scaling=0 net.ipv4.tcp_ecn=1
}

# The server's host is flooded with pings.
filter_pings() { b timeout 4 ping -qf -s 1400 -c 20000 10.77.0.1 || true; }

# The hosts send with the TTL 9.
# network: routed
filter_ttl() { both sysctl -qw net.ipv4.ip_default_ttl=9 net.ipv6.conf.all.hop_limit=9; }

# The hosts answer ARP for the addresses of their interfaces only.
filter_arp() {
    both sysctl -qw net.ipv4.conf.all.arp_ignore=1 net.ipv4.conf.all.arp_announce=2 net.ipv4.conf.all.rp_filter=1
}
