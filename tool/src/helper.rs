//! The helper `xwarpd` and its interfaces, as `xwarp stat` shows them.

use std::io::{self, Write};

use serde_json::{Map, Value, json};
use xwarp_driver::{
    DriverConfig, OpenError,
    inspect::{Description, Quota, shared_interfaces},
};

/// The interfaces that the helper shares; none when no helper answers, or not to this user.
///
/// # Errors
/// A helper runs, but violates the protocol.
pub fn interfaces() -> Result<Vec<Description>, OpenError> {
    match shared_interfaces(&DriverConfig::default()) {
        Err(OpenError::NoHelper { .. } | OpenError::NotInGroup { .. } | OpenError::Excluded { .. }) => {
            Ok(Vec::new())
        }
        other => other,
    }
}

/// The paths of frames between the interface and clients, in both directions.
pub fn modes(interface: &Description) -> String {
    let clients = if interface.generic_clients { "generic" } else { "native" };
    format!("{}, {clients} from clients", interface.hook)
}

/// Prints interfaces for people.
pub fn write(interfaces: &[Description], out: &mut dyn Write) -> io::Result<()> {
    for interface in interfaces {
        let Description { name, mtu, up, devices, .. } = interface;
        let s = if *devices == 1 { "" } else { "s" };
        let up = if *up { "up" } else { "DOWN" };
        writeln!(out, "{name} shared by xwarpd: {}, MTU {mtu}, {up}, {devices} device{s}", modes(interface))?;
        let seen: Vec<_> = interface.counters.iter().filter(|(_, value)| *value > 0).collect();
        let frames: Vec<_> = seen.iter().map(|(name, value)| format!("{name} {value}")).collect();
        writeln!(out, "  frames: {}", if frames.is_empty() { "none".to_owned() } else { frames.join(", ") })?;
    }
    if let Some(Description { own_devices, own_ports, own_memory_bytes, .. }) = interfaces.first() {
        let of = |quota: &Quota, unit: u64| format!("{} of {}", quota.used.div_ceil(unit), quota.most / unit);
        let [devices, ports] = [own_devices, own_ports].map(|quota| of(quota, 1));
        let memory = of(own_memory_bytes, 1 << 20);
        writeln!(out, "  this user has {devices} devices, {ports} ports, {memory} MiB of frame memory")?;
    }
    Ok(())
}

/// The same as JSON.
pub fn json(interfaces: &[Description]) -> Value {
    let quota = |quota: &Quota| json!({ "used": quota.used, "most": quota.most });
    let one = |interface: &Description| {
        let counters: Map<_, _> =
            interface.counters.iter().map(|(name, value)| (name.clone(), Value::from(*value))).collect();
        json!({
            "interface": interface.name,
            "carrier": interface.carrier,
            "mtu": interface.mtu,
            "up": interface.up,
            "hook": interface.hook.to_string(),
            "generic_clients": interface.generic_clients,
            "devices": interface.devices,
            "own_devices": quota(&interface.own_devices),
            "own_ports": quota(&interface.own_ports),
            "own_memory_bytes": quota(&interface.own_memory_bytes),
            "frames": counters,
        })
    };
    interfaces.iter().map(one).collect()
}
