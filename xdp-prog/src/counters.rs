//! [`ProgramCounters`]: how many frames the program steered, and why it passed the others.

use libbpf_rs::{MapCore, MapFlags};

macro_rules! program_counters {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {
        /// Frames by what the program did with them, in the order of `enum reason` in `bpf/steer.bpf.c`.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        pub struct ProgramCounters {
            $($(#[$doc])* pub $name: u64),+
        }

        impl ProgramCounters {
            const COUNT: u32 = [$(stringify!($name)),+].len() as u32;

            /// Name (`program.` before it) and value of each counter, in order.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
                [$((concat!("program.", stringify!($name)), self.$name)),+].into_iter()
            }

            fn from_values(mut values: impl Iterator<Item = u64>) -> Self {
                Self { $($name: values.next().unwrap_or(0)),+ }
            }
        }
    };
}

program_counters! {
    /// Steered: segments of our connections.
    steered_flow,
    /// Steered: SYNs to our listening ports.
    steered_listener,
    /// Steered: ICMP errors that quote one of our connections.
    steered_icmp,
    /// Passed: ours, but no AF_XDP socket serves the queue.
    no_socket,
    /// Passed: multicast or broadcast.
    passed_not_unicast,
    /// Passed: neither IPv4 nor IPv6.
    passed_not_ip,
    /// Passed: other VLAN tags than ours.
    passed_vlan,
    /// Passed: an IP fragment.
    passed_fragment,
    /// Passed: neither TCP nor ICMP, or an IPv6 packet with extension headers.
    passed_not_tcp,
    /// Passed: ICMP that quotes none of our connections.
    passed_icmp,
    /// Passed: TCP that is not ours.
    passed_tcp,
    /// Passed: shorter than its headers say.
    passed_truncated,
    /// Passed: TCP over IPv6 between IPv4-mapped addresses, or ICMPv6 that quotes it.
    passed_mapped,
}

pub(crate) fn read(map: &impl MapCore) -> libbpf_rs::Result<ProgramCounters> {
    let mut sums = Vec::with_capacity(ProgramCounters::COUNT as usize);
    for reason in 0..ProgramCounters::COUNT {
        let per_cpu = map.lookup_percpu(&reason.to_ne_bytes(), MapFlags::ANY)?.unwrap_or_default();
        let values = per_cpu.iter().filter_map(|value| value.first_chunk::<8>());
        sums.push(values.map(|value| u64::from_ne_bytes(*value)).sum());
    }
    Ok(ProgramCounters::from_values(sums.into_iter()))
}
