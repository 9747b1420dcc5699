#!/bin/bash
# Addresses of the two hosts.

# The client's address is there with a second, shorter prefix; the first is removed.
# quick
address_shorter_prefix() {
    a ip addr add 10.77.0.1/16 dev "$X"
    a ip addr del 10.77.0.1/24 dev "$X"
    a ip addr add fd77::1/48 dev "$X" nodad || true
}

# The client's address is there a second time as /32, which is removed.
address_host_prefix() {
    a ip addr add 10.77.0.1/32 dev "$X"
    a ip addr del 10.77.0.1/32 dev "$X"
}

# The server's address is there with a second prefix; the first is removed.
address_server_prefix() {
    b ip addr add 10.77.0.2/16 dev "$X"
    b ip addr del 10.77.0.2/24 dev "$X"
}

# The client's addresses are gone for 2 s.
# quick
# seconds: 8
address_gone_client() { addresses_gone a 2; }

# The server's addresses are gone for 2 s.
# quick
# seconds: 8
address_gone_server() { addresses_gone b 2; }

# The client's addresses are gone for 8 s.
# seconds: 24
address_gone_long() { addresses_gone a 8; }

# All addresses are flushed and added again, as when a network manager starts anew.
address_flushed() {
    a ip addr flush dev "$X" scope global
    a ip addr add 10.77.0.1/24 dev "$X"
    a ip addr add fd77::1/64 dev "$X" nodad
}

# Another address is added and removed, ten times.
address_other() {
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        b ip addr add 10.77.0.77/24 dev "$X"
        b ip addr add fd77::77/64 dev "$X" nodad
        b ip addr del 10.77.0.77/24 dev "$X"
        b ip addr del fd77::77/64 dev "$X"
    done
}

# Four thousand addresses are added and removed.
# seconds: 20
address_thousands() {
    for i in $(seq 0 15); do
        for j in $(seq 0 249); do
            echo "addr add 10.99.$i.$j/32 dev $X"
        done
    done > "$SCRATCH/batch"
    b ip -batch "$SCRATCH/batch"
    sed -i 's/ add / del /' "$SCRATCH/batch"
    b ip -batch "$SCRATCH/batch"
}

# The addresses are deprecated, then preferred again.
# worse: the kernel's route of the IPv6 prefix expires with it, and the kernel announces that only when it collects such routes
address_deprecated() {
    a ip addr change 10.77.0.1/24 dev "$X" valid_lft 600 preferred_lft 0
    a ip addr change fd77::1/64 dev "$X" valid_lft 600 preferred_lft 0
    sleep 2
    a ip addr change 10.77.0.1/24 dev "$X" valid_lft forever preferred_lft forever
    a ip addr change fd77::1/64 dev "$X" valid_lft forever preferred_lft forever
}

# The lifetime of the client's IPv4 address is renewed every half second, as by DHCP.
address_renewed() {
    for _ in 1 2 3 4 5 6; do
        a ip addr change 10.77.0.1/24 dev "$X" valid_lft 9 preferred_lft 9
        sleep 0.5
    done
    a ip addr change 10.77.0.1/24 dev "$X" valid_lft forever preferred_lft forever
}

# The addresses end by their lifetime, and are added again.
# seconds: 10
address_expires() {
    a ip addr change 10.77.0.1/24 dev "$X" valid_lft 2 preferred_lft 1
    a ip addr change fd77::1/64 dev "$X" valid_lft 2 preferred_lft 1
    sleep 4
    a ip addr replace 10.77.0.1/24 dev "$X"
    a ip addr replace fd77::1/64 dev "$X" nodad
}

# The primary address of the server's prefix is removed; the connections use a secondary that is promoted.
# servers: 10.77.0.3 fd77::3
address_promoted() {
    b sysctl -qw net.ipv4.conf.all.promote_secondaries=1
    b ip addr del 10.77.0.2/24 dev "$X"
    b ip addr del fd77::2/64 dev "$X"
}

# The server's virtual addresses are on its loopback interface; another is added there.
# servers: 10.79.0.9 fd79::9
address_loopback() {
    b ip addr add 10.79.0.10/32 dev lo
    b ip addr del 10.79.0.10/32 dev lo
}

# The server's virtual addresses move from its loopback interface to another interface.
# servers: 10.79.0.9 fd79::9
# seconds: 8
address_moves() {
    b ip link add moved type veth peer name moved0
    b ip link set moved0 up
    b ip link set moved up
    b ip addr add 10.79.0.9/32 dev moved
    b ip addr add fd79::9/128 dev moved nodad
    b ip addr del 10.79.0.9/32 dev lo
    b ip addr del fd79::9/128 dev lo
}

# The client's addresses are added to its loopback interface, and removed there.
address_twice_on_host() {
    a ip addr add 10.77.0.1/32 dev lo
    a ip addr add fd77::1/128 dev lo
    sleep 1
    a ip addr del 10.77.0.1/32 dev lo
    a ip addr del fd77::1/128 dev lo
}

# IPv6 is turned off on the client's interface for 2 s.
# seconds: 10
address_ipv6_off() {
    a sysctl -qw net.ipv6.conf."$X".disable_ipv6=1
    sleep 2
    a sysctl -qw net.ipv6.conf."$X".disable_ipv6=0
    a ip addr add fd77::1/64 dev "$X" nodad
}
