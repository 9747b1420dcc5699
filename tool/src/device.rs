//! Names of interfaces after `--device`, checked before a program is started with them.

use anyhow::{Result, bail};
use xwarp_driver::{DriverConfig, OpenError, ResolveError, inspect};

use crate::helper;

/// Refuses the name of an interface that cannot be a device of a program in this network namespace: there is none of this name, it
/// is no Ethernet interface, it is down, or has no address. Whether it may be opened is seen when the program opens it.
pub fn check(name: &str) -> Result<()> {
    let found = match inspect::inspect(name, &DriverConfig::default()) {
        Ok(found) => found,
        Err(error @ (OpenError::NoSuchInterface { .. } | OpenError::NotEthernet { .. })) => bail!("{error}"),
        Err(_) => return Ok(()),
    };
    if !found.link.admin_up {
        bail!(ResolveError::LinkDown { name: name.to_owned() }.to_string());
    }
    if found.addresses.is_empty() {
        bail!("{name} has no IP address: ip addr add ADDRESS/PREFIX dev {name}");
    }
    Ok(())
}

/// The same for a program that also takes an interface that only the helper has.
pub fn check_or_shared(name: &str) -> Result<()> {
    let is_shared = helper::interfaces().is_ok_and(|shared| shared.iter().any(|shared| shared.name == name));
    if is_shared { Ok(()) } else { check(name) }
}
