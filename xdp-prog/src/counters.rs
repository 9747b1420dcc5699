//! [`ProgramCounters`] and [`SwitchCounters`]: the programs' actions on frames, and the reasons for passing or dropping frames.

use libbpf_rs::{MapCore, MapFlags};

/// A struct of counters whose first fields are those of `enum reason` in `bpf/frame.h`.
macro_rules! program_counters {
    ($(#[$outer:meta])* $struct:ident, $prefix:literal; $($(#[$doc:meta])* $name:ident),+ $(,)?) => {
        program_counters! {
            @all $(#[$outer])* $struct, $prefix;
            /// Passed: multicast or broadcast.
            passed_not_unicast,
            /// Passed: neither IPv4 nor IPv6.
            passed_not_ip,
            /// Passed: VLAN tags other than ours.
            passed_vlan,
            /// Passed: an IP fragment of a packet that is not ours, or that has overtaken the first one.
            passed_fragment,
            /// Passed: neither TCP nor ICMP.
            passed_not_tcp,
            /// Passed: ICMP that quotes none of our connections.
            passed_icmp,
            /// Passed: TCP that is not ours.
            passed_tcp,
            /// Passed: shorter than its headers say.
            passed_truncated,
            /// Passed: TCP over IPv6 between IPv4-mapped addresses, or ICMPv6 that quotes it.
            passed_mapped,
            /// Passed: ours, but to the Ethernet address of another station.
            passed_other_station,
            /// Dropped: ours, from an address that no other host can have.
            dropped_martian,
            /// Dropped: to us, with more headers between IP and TCP than are looked behind.
            dropped_headers,
            $($(#[$doc])* $name),+
        }
    };
    (@all $(#[$outer:meta])* $struct:ident, $prefix:literal; $($(#[$doc:meta])* $name:ident),+) => {
        $(#[$outer])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        pub struct $struct {
            $($(#[$doc])* pub $name: u64),+
        }

        impl $struct {
            const COUNT: u32 = [$(stringify!($name)),+].len() as u32;

            /// Name and value of each counter, in order.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
                [$((concat!($prefix, ".", stringify!($name)), self.$name)),+].into_iter()
            }

            pub(crate) fn read(map: &impl MapCore) -> libbpf_rs::Result<Self> {
                let mut values = read(map, Self::COUNT)?.into_iter();
                Ok(Self { $($name: values.next().unwrap_or(0)),+ })
            }
        }
    };
}

program_counters! {
    /// Frames by the steering program's action, in the order of `bpf/steer.bpf.c`.
    ProgramCounters, "program";
    /// Steered: segments of our connections.
    steered_flow,
    /// Steered: SYNs to our listening ports.
    steered_listener,
    /// Steered: ICMP errors that quote one of our connections.
    steered_icmp,
    /// Steered: fragments of segments of our connections and to our listening ports.
    steered_fragment,
    /// Dropped: ours, but no AF_XDP socket serves the queue yet.
    dropped_no_socket,
}

program_counters! {
    /// Frames by the action of the switch's programs, in the order of `bpf/switch.bpf.c`.
    SwitchCounters, "switch";
    /// Redirected: from the interface to a client.
    to_client,
    /// Redirected: from a client to a client of the same host.
    to_local_client,
    /// Redirected: from a client out of the interface.
    to_wire,
    /// Dropped: not a TCP segment, or sent by a client from an address or a port that is not its own.
    dropped_foreign,
    /// Answered by a reset: a client sent it to an address of this interface and a port that no client owns.
    refused,
    /// Dropped: as before, but the segment is a reset, or has a form that is not answered.
    dropped_no_owner,
    /// Dropped: its client has no socket.
    dropped_no_socket,
    /// Dropped: from or to a peer that the administrator does not allow.
    dropped_peer,
    /// Dropped: its client sends faster than the administrator allows.
    dropped_rate,
}

/// The sum of each counter over all CPUs.
fn read(map: &impl MapCore, counters: u32) -> libbpf_rs::Result<Vec<u64>> {
    let mut sums = Vec::with_capacity(counters as usize);
    for reason in 0..counters {
        let per_cpu = map.lookup_percpu(&reason.to_ne_bytes(), MapFlags::ANY)?.unwrap_or_default();
        let values = per_cpu.iter().filter_map(|value| value.first_chunk::<8>());
        sums.push(values.map(|value| u64::from_ne_bytes(*value)).sum());
    }
    Ok(sums)
}
