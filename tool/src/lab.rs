//! `xwarp lab`: two network namespaces joined by a veth pair, made by the script `lab.sh`, which `ci/lab` of the repository
//! calls too.

use std::{
    ffi::{OsStr, OsString},
    io,
    process::{Command, ExitStatus},
};

const SCRIPT: &str = include_str!("lab.sh");

/// A lab's properties; `None` leaves the script's default.
#[derive(Debug, Clone, Default)]
pub struct Properties {
    /// MTU in bytes.
    pub mtu: Option<u32>,
    /// Queues of each interface.
    pub queues: Option<u16>,
    /// Id of a VLAN interface on each end.
    pub vlan: Option<u16>,
    /// Turn the kernel's segmentation and receive offloads off.
    pub without_offloads: bool,
}

/// Removes the lab of this name, if there is one, and makes a new one.
pub fn up(name: &str, properties: &Properties) -> io::Result<ExitStatus> {
    let Properties { mtu, queues, vlan, without_offloads } = properties;
    let mut arguments = vec!["up".to_owned()];
    let numbers = [
        ("--mtu", mtu.map(u64::from)),
        ("--queues", queues.map(Into::into)),
        ("--vlan", vlan.map(Into::into)),
    ];
    for (option, value) in numbers {
        arguments.extend(value.into_iter().flat_map(|value| [option.to_owned(), value.to_string()]));
    }
    if *without_offloads {
        arguments.extend(["--offloads".to_owned(), "off".to_owned()]);
    }
    script(name, arguments)
}

/// Removes the lab, and kills the processes in it.
pub fn down(name: &str) -> io::Result<ExitStatus> {
    script(name, ["down"])
}

/// Shows the lab's addresses.
pub fn show(name: &str) -> io::Result<ExitStatus> {
    script(name, ["show"])
}

/// Runs a program in one of the namespaces, `a` or `b`.
pub fn run(name: &str, side: &str, command: &[OsString]) -> io::Result<ExitStatus> {
    let arguments = ["exec".as_ref(), side.as_ref()].into_iter();
    script(name, arguments.chain(command.iter().map(OsString::as_os_str)))
}

fn script<S: AsRef<OsStr>>(name: &str, arguments: impl IntoIterator<Item = S>) -> io::Result<ExitStatus> {
    let mut bash = Command::new("bash");
    bash.args(["-c", SCRIPT, "xwarp lab", "--name", name]).args(arguments);
    bash.env("XWARP_LAB_CALLER", "xwarp lab").status()
}
