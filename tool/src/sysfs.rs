//! `xwarp run --sysfs`: a mount namespace in which `/sys/class/infiniband` and `/dev/infiniband` list the devices, for scripts and
//! test runners that look there. The kernel cannot list them, since no kernel driver has them.
//!
//! Neither directory can be made in the file system of the kernel. So a private temporary file system covers the directory above,
//! with all entries of the covered one mounted again, and the new ones beside them.

use std::{
    fmt::Write as _,
    fs::{self, File},
    io,
    net::IpAddr,
    os::{fd::AsRawFd as _, unix::fs::symlink},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use nix::{
    errno::Errno,
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
};
use rustix::process::{getgid, getuid};
use xwarp_driver::netlink::{Netlink, link::KernelLink};

/// Where the lists are.
const CLASSES: &str = "/sys/class";
const NODES: &str = "/dev";
/// Names of the lists in these directories.
const DEVICES: &str = "infiniband";
const VERBS: &str = "infiniband_verbs";
/// A device file that every process may open stands for those of the devices, which our library does not open.
const NOTHING: &str = "/dev/null";

/// The kind of device that a program sees: the words of `XWARP_AS`, which our library reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Face {
    /// An RNIC of iWARP.
    #[default]
    Iwarp,
    /// An RNIC of an unspecified transport.
    Unspecified,
    /// A channel adapter with a port of RoCE version 2.
    Roce,
}

impl Face {
    fn node_type(self) -> &'static str {
        match self {
            Self::Iwarp | Self::Unspecified => "4: RNIC",
            Self::Roce => "1: CA",
        }
    }

    fn gid_type(self) -> &'static str {
        match self {
            Self::Iwarp | Self::Unspecified => "IB/RoCE v1",
            Self::Roce => "RoCE v2",
        }
    }
}

/// An interface that is a device.
struct Device {
    link: KernelLink,
    addresses: Vec<IpAddr>,
}

/// Moves this process, and the program that will replace it, to a mount namespace that lists `devices`, or with an empty list all
/// suitable interfaces. The lists are made once: they do not change with the interfaces.
pub fn enter(devices: &[String], face: Face) -> Result<()> {
    let devices = find(devices).context("reading the interfaces")?;
    let doing = "--sysfs needs a mount namespace: CAP_SYS_ADMIN, or user namespaces for this user";
    own_namespace().context(doing)?;
    cover(Path::new(CLASSES), &[DEVICES, VERBS]).context("covering /sys/class")?;
    cover(Path::new(NODES), &[DEVICES]).context("covering /dev")?;
    for (number, device) in devices.iter().enumerate() {
        device.list(number, face).with_context(|| format!("listing {}", device.link.name))?;
    }
    write(&Path::new(CLASSES).join(VERBS).join("abi_version"), "6")?;
    node("rdma_cm").context("the entry of the connection manager in /dev/infiniband")
}

/// The devices as our library finds them: Ethernet, up, with an address; in the order of the names if there are any.
fn find(names: &[String]) -> io::Result<Vec<Device>> {
    let mut netlink = Netlink::open()?;
    let mut found = Vec::new();
    for link in netlink.links()? {
        let addresses = netlink.addresses(link.index)?;
        let is_chosen = names.is_empty() || names.contains(&link.name);
        if link.ethernet && link.admin_up && is_chosen && !addresses.is_empty() {
            found.push(Device { link, addresses });
        }
    }
    found.sort_by_key(|Device { link, .. }| {
        (names.iter().position(|name| *name == link.name), link.name.clone())
    });
    Ok(found)
}

/// A mount namespace whose mounts are seen here only. Without the capability for one, this user gets it in a user namespace.
fn own_namespace() -> Result<()> {
    match unshare(CloneFlags::CLONE_NEWNS) {
        Err(Errno::EPERM) => {
            let (user, group) = (getuid().as_raw(), getgid().as_raw());
            unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS)?;
            fs::write("/proc/self/setgroups", "deny")?;
            fs::write("/proc/self/uid_map", format!("{user} {user} 1"))?;
            fs::write("/proc/self/gid_map", format!("{group} {group} 1"))?;
        }
        made => made?,
    }
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_SLAVE, None::<&str>)?;
    Ok(())
}

/// Covers `directory` by a file system with the same entries, except that those of `names` are empty directories.
fn cover(directory: &Path, names: &[&str]) -> Result<()> {
    let below = File::open(directory)?;
    let below = PathBuf::from(format!("/proc/self/fd/{}", below.as_raw_fd()));
    let entries: Vec<_> = fs::read_dir(&below)?.collect::<io::Result<_>>()?;
    mount(Some("xwarp"), directory, Some("tmpfs"), MsFlags::empty(), Some("mode=755"))?;
    for entry in entries {
        let (name, kind) = (entry.file_name(), entry.file_type()?);
        let place = directory.join(&name);
        if names.iter().any(|own| name == *own) {
            continue;
        }
        if kind.is_symlink() {
            symlink(fs::read_link(entry.path())?, place)?;
            continue;
        }
        if kind.is_dir() {
            fs::create_dir(&place)?;
        } else {
            File::create(&place)?;
        }
        bind(&below.join(&name), &place)?;
    }
    for name in names {
        fs::create_dir(directory.join(name))?;
    }
    Ok(())
}

fn bind(from: &Path, to: &Path) -> nix::Result<()> {
    mount(Some(from), to, None::<&str>, MsFlags::MS_BIND | MsFlags::MS_REC, None::<&str>)
}

/// Makes an entry of `/dev/infiniband`.
fn node(name: &str) -> Result<()> {
    let place = Path::new(NODES).join(DEVICES).join(name);
    File::create(&place)?;
    Ok(bind(Path::new(NOTHING), &place)?)
}

/// Writes a file as the kernel shows it: one line.
fn write(path: &Path, line: &str) -> io::Result<()> {
    fs::create_dir_all(path.parent().unwrap_or(Path::new("/")))?;
    fs::write(path, format!("{line}\n"))
}

impl Device {
    /// Makes the entries of this device, the one of this number.
    fn list(&self, number: usize, face: Face) -> Result<()> {
        let name = &self.link.name;
        let (device, verbs) = (Path::new(CLASSES).join(DEVICES).join(name), format!("uverbs{number}"));
        let guid = self.guid();
        for (file, line) in [
            ("node_type", face.node_type()),
            ("node_guid", &guid),
            ("sys_image_guid", &guid),
            ("node_desc", "xwarp"),
            ("hca_type", "xwarp"),
            ("fw_ver", env!("CARGO_PKG_VERSION")),
        ] {
            write(&device.join(file), line)?;
        }
        // Of a real network card the kernel shows the directory of its bus.
        let card = Path::new(CLASSES).join("net").join(name).join("device");
        if card.exists() {
            symlink(fs::canonicalize(card)?, device.join("device"))?;
        } else {
            fs::create_dir_all(device.join("device/net"))?;
            symlink(Path::new(CLASSES).join("net").join(name), device.join("device/net").join(name))?;
        }
        self.list_port(&device.join("ports/1"), face)?;
        let entry = Path::new(CLASSES).join(VERBS).join(&verbs);
        write(&entry.join("ibdev"), name)?;
        write(&entry.join("abi_version"), "1")?;
        node(&verbs)?;
        // The name of the device's file in `struct ibv_device`.
        node(&format!("xwarp-{name}"))
    }

    fn list_port(&self, port: &Path, face: Face) -> Result<()> {
        let (state, physical) =
            if self.link.up { ("4: ACTIVE", "5: LinkUp") } else { ("1: DOWN", "3: Disabled") };
        for (file, line) in [
            ("state", state),
            ("phys_state", physical),
            ("link_layer", "Ethernet"),
            ("rate", "40 Gb/sec (4X QDR)"),
            ("lid", "0x0"),
            ("sm_lid", "0x0"),
            ("pkeys/0", "0xffff"),
        ] {
            write(&port.join(file), line)?;
        }
        for (index, address) in self.gids().iter().enumerate() {
            write(&port.join(format!("gids/{index}")), &gid(*address))?;
            write(&port.join(format!("gid_attrs/ndevs/{index}")), &self.link.name)?;
            write(&port.join(format!("gid_attrs/types/{index}")), face.gid_type())?;
        }
        Ok(())
    }

    /// The addresses in the order of our library's table: IPv4 first, link-local addresses last.
    fn gids(&self) -> Vec<IpAddr> {
        let rank = |address: &IpAddr| match address {
            IpAddr::V4(_) => 0,
            IpAddr::V6(v6) if v6.is_unicast_link_local() => 2,
            IpAddr::V6(_) => 1,
        };
        let mut addresses = self.addresses.clone();
        addresses.sort_by_key(|address| (rank(address), *address));
        addresses
    }

    /// The EUI-64 of the Ethernet address.
    fn guid(&self) -> String {
        let mac = self.link.mac.0;
        let eui = [mac[0] ^ 2, mac[1], mac[2], 0xff, 0xfe, mac[3], mac[4], mac[5]];
        let groups = eui.chunks(2).map(|pair| format!("{:02x}{:02x}", pair[0], pair[1]));
        groups.collect::<Vec<_>>().join(":")
    }
}

/// Eight groups of four digits, as the kernel shows a GID. IPv4 addresses are mapped.
fn gid(address: IpAddr) -> String {
    let address = match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    address.segments().iter().enumerate().fold(String::new(), |mut text, (index, group)| {
        let colon = if index > 0 { ":" } else { "" };
        let _ = write!(text, "{colon}{group:04x}");
        text
    })
}
