//! The helper, and interfaces that it shares.

use xwarp_driver::{
    DriverConfig, OpenError,
    inspect::{Description, Hook, shared_interfaces},
};

use super::{Finding, interface, machine};
use crate::helper::modes;

/// The finding about the helper, and the interfaces that it shares.
pub(super) fn find() -> (Finding, Vec<Description>) {
    match shared_interfaces(&DriverConfig::default()) {
        Ok(shared) => {
            let names: Vec<_> = shared.iter().map(|shared| shared.name.as_str()).collect();
            (Finding::ok("helper", format!("xwarpd shares {}", names.join(", "))), shared)
        }
        Err(error @ OpenError::NoHelper { .. }) => {
            let advice =
                "only needed to share an interface among processes, or without privileges: xwarpd IFACE";
            (Finding::note("helper", error.to_string()).advice(advice), Vec::new())
        }
        Err(error @ OpenError::NotInGroup { .. }) => (Finding::note("helper", error.to_string()), Vec::new()),
        Err(error) => (Finding::problem("helper", error.to_string()), Vec::new()),
    }
}

/// The findings about a shared interface. The helper has the necessary privileges, and frame memory is charged to it.
pub(super) fn examine(name: &str, shared: &Description, helper: Finding, open: bool) -> Vec<Finding> {
    let mut findings = vec![machine::kernel(), helper, link(shared), mode(shared), quota(shared)];
    if open {
        findings.push(interface::trial(name, &DriverConfig::default()));
    }
    findings
}

fn link(shared: &Description) -> Finding {
    let Description { name, mtu, up, devices, .. } = shared;
    if !up {
        return Finding::problem("link", format!("{name} is down or has no carrier"))
            .advice(format!("where xwarpd runs: ip link set dev {name} up, and connect the cable"));
    }
    Finding::ok("link", format!("{name} is up, MTU {mtu}, with {devices} devices of all users"))
}

fn mode(shared: &Description) -> Finding {
    let found = modes(shared);
    match (shared.hook, shared.generic_clients) {
        (Hook::Native, false) => Finding::ok("mode", found),
        (Hook::Native, true) => {
            Finding::note("mode", format!("{found}: the interface takes no redirected frames"))
        }
        (Hook::TrafficControl, _) => Finding::note("mode", found),
        (Hook::Generic, _) => {
            Finding::note("mode", format!("{found}: the driver has no native XDP, or --generic was given"))
        }
    }
}

fn quota(shared: &Description) -> Finding {
    let (used, most) = (shared.own_devices.used, shared.own_devices.most);
    if used >= most {
        return Finding::problem("limits", format!("this user has {used} devices already"))
            .advice("close one, or raise --devices-per-user of xwarpd");
    }
    Finding::ok("limits", format!("this user has {used} of {most} devices"))
}
