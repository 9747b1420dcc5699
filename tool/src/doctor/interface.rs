//! An interface.

use xwarp_driver::{
    AttachMode, Attached, DriverConfig, Interface, OpenError, PROGRAM_NAME, SINGLE_CHUNK_MTU, af_xdp_users,
    inspect::{Inspection, MULTI_BUFFER_KERNEL, inspect, kernel_release},
    netlink::Netlink,
};

use super::{Finding, machine::Rights};

/// The interfaces that could be examined.
pub(super) fn list() -> Finding {
    let links = match Netlink::open().and_then(|mut netlink| netlink.links()) {
        Ok(links) => links,
        Err(error) => {
            return Finding::problem("interfaces", format!("cannot be listed: {error}"));
        }
    };
    let names: Vec<_> = links.into_iter().filter(|link| link.ethernet).map(|link| link.name).collect();
    match &names[..] {
        [] => Finding::problem("interfaces", "no Ethernet interface in this network namespace")
            .advice("make two namespaces joined by a veth pair: xwarp lab up"),
        [first, ..] => Finding::note("interfaces", format!("Ethernet interfaces: {}", names.join(", ")))
            .advice(format!("examine one: xwarp doctor {first}")),
    }
}

pub(super) fn examine(name: &str, rights: &Rights, open: bool) -> Vec<Finding> {
    let config = DriverConfig::default();
    let found = match inspect(name, &config) {
        Ok(found) => found,
        Err(error) => return vec![Finding::problem("interface", error.to_string())],
    };
    let mut findings = vec![link(&found), mtu(&found), addresses(&found), program(&found, rights)];
    findings.extend(sockets());
    findings.extend(offloads(&found));
    findings.push(rights.memory(found.locked_bytes));
    if open {
        findings.push(trial(name, &config));
    }
    findings
}

fn link(found: &Inspection) -> Finding {
    let name = &found.link.name;
    let queues = found.receive_queues;
    if !found.link.admin_up {
        return Finding::problem("link", format!("{name} is down"))
            .advice(format!("ip link set dev {name} up"));
    }
    if !found.link.up {
        return Finding::problem("link", format!("{name} has no carrier"))
            .advice("connect the cable, or set the other end of the veth pair up");
    }
    let below = if found.link == found.carrier {
        String::new()
    } else {
        format!(" (a VLAN of {}, whose XDP program it shares)", found.carrier.name)
    };
    Finding::ok(
        "link",
        format!("{name}{below} is up, with {queues} receive queue{}", if queues == 1 { "" } else { "s" }),
    )
}

fn mtu(found: &Inspection) -> Finding {
    let (name, mtu) = (&found.link.name, found.link.mtu);
    let largest = u32::from(SINGLE_CHUNK_MTU);
    let multi_buffer = kernel_release().is_none_or(|(_, version)| version >= MULTI_BUFFER_KERNEL);
    if mtu > largest && !multi_buffer {
        return Finding::problem("mtu", format!("{mtu} bytes: this kernel gives XDP at most {largest}"))
            .advice(format!("ip link set dev {name} mtu {largest}, at both ends"));
    }
    if mtu < 1280 {
        return Finding::warning("mtu", format!("{mtu} bytes: IPv6 needs 1280"))
            .advice(format!("ip link set dev {name} mtu 1500, at both ends"));
    }
    if mtu <= 1500 {
        let larger = if multi_buffer { 9000 } else { largest };
        return Finding::note("mtu", format!("{mtu} bytes; larger frames are faster"))
            .advice(format!("if the network allows it: ip link set dev {name} mtu {larger}, at both ends"));
    }
    Finding::ok("mtu", format!("{mtu} bytes"))
}

fn addresses(found: &Inspection) -> Finding {
    let name = &found.link.name;
    if found.addresses.is_empty() {
        return Finding::problem("addresses", format!("{name} has no IP address"))
            .advice(format!("ip addr add 10.0.0.1/24 dev {name}"));
    }
    let list: Vec<_> = found.addresses.iter().map(ToString::to_string).collect();
    Finding::ok("addresses", list.join(", "))
}

fn program(found: &Inspection, rights: &Rights) -> Finding {
    let name = found.carrier.name.clone();
    let Some(there) = found.program.clone() else {
        return Finding::ok("xdp", "no XDP program is attached");
    };
    let detach = there.detach_command(&name);
    let Attached { id, name: program, mode, holder, .. } = there;
    let shown = match mode {
        AttachMode::Native => "native",
        AttachMode::Generic => "generic",
    };
    let unseen = if holder.is_none() && !rights.are_complete() {
        "; root can see the process that holds it"
    } else {
        ""
    };
    let error = if program == PROGRAM_NAME {
        OpenError::InUse { name, holder }
    } else {
        OpenError::ForeignProgram { name, program, id, detach, holder }
    };
    Finding::problem("xdp", format!("XDP program {id} is attached in {shown} mode{unseen}"))
        .advice(error.to_string())
}

/// AF_XDP sockets of this machine. Their interfaces are not known.
fn sockets() -> Option<Finding> {
    let users: Vec<_> = af_xdp_users().iter().map(ToString::to_string).collect();
    (!users.is_empty()).then(|| {
        Finding::note("sockets", format!("on some interface, AF_XDP is used by {}", users.join(", ")))
    })
}

fn offloads(found: &Inspection) -> Vec<Finding> {
    let name = &found.carrier.name;
    let (gro, lro) = found.joins_segments;
    let mut findings = Vec::new();
    if lro {
        findings.push(
            Finding::warning("offloads", "the device joins received segments (LRO), which XDP forbids")
                .advice(format!("ethtool -K {name} lro off")),
        );
    }
    if found.strips_vlan_tags {
        let text = "VLAN tags may be taken off before XDP sees them";
        let finding = if found.link == found.carrier {
            Finding::note("offloads", format!("{text}; this matters for VLANs on {name} only"))
        } else {
            Finding::warning("offloads", format!("{text}, and frames be missed"))
        };
        findings.push(finding.advice(format!("ethtool -K {name} rxvlan off")));
    }
    if gro {
        findings.push(
            Finding::note(
                "offloads",
                "the kernel joins received segments (GRO), which matters in generic mode before kernel 6.6 only",
            )
            .advice(format!("if the mode is generic: ethtool -K {name} gro off")),
        );
    }
    if findings.is_empty() {
        findings.push(Finding::ok("offloads", "nothing changes frames before XDP sees them"));
    }
    findings
}

/// Opens the interface for a moment.
pub(super) fn trial(name: &str, config: &DriverConfig) -> Finding {
    match Interface::open(name, config) {
        Ok(interface) => {
            let attributes = interface.attributes();
            Finding::ok(
                "open",
                format!("opened in {} mode, path MTU {}", attributes.mode, attributes.path_mtu),
            )
        }
        Err(error) => Finding::problem("open", error.to_string()),
    }
}
