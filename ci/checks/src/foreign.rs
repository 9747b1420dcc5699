//! An XDP program of another owner on side A's interface, like a firewall's.

use std::{fs, process::Command, time::Duration};

use anyhow::{Context as _, Result, ensure};

use crate::{
    lab::{INTERFACE, Lab, Side},
    process::Running,
};

/// Attaches a program that passes all frames by `ip link`, whose `keyword` names the mode, and returns its id.
pub fn attach(lab: &Lab, keyword: &str) -> Result<u32> {
    let (source, object) = (lab.file("foreign.c"), lab.file("foreign.o"));
    fs::write(&source, "__attribute__((section(\"xdp\"), used)) int foreign(void *frame) { return 2; }")?;
    let mut clang = Command::new("clang");
    clang.args(["-O2", "-target", "bpf", "-c"]).arg(&source).arg("-o").arg(&object);
    ensure!(clang.status().context("cannot run clang")?.success(), "clang fails");
    let object = object.to_str().context("a path of this lab is text")?;
    lab.run(Side::A, "ip", &["link", "set", "dev", INTERFACE, keyword, "obj", object, "sec", "xdp"])?;
    attached(lab)?.context("no program is attached")
}

/// Attaches such a program by a link (`bpf_link`), and returns the process that holds it.
pub fn attach_by_link(lab: &Lab) -> Result<Running> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/network/detach.py");
    let mut command = lab.command(Side::A, "python3");
    // Of process 0 there is nothing to detach.
    command.args([script, "0", INTERFACE]);
    let mut holder = Running::start_with(command, std::process::Stdio::piped())?;
    holder.wait_for("detached", Duration::from_secs(20))?;
    Ok(holder)
}

/// The id of the program on the interface.
pub fn attached(lab: &Lab) -> Result<Option<u32>> {
    let shown = lab.run(Side::A, "ip", &["link", "show", "dev", INTERFACE])?;
    let Some((_, id)) = shown.split_once("prog/xdp id ") else { return Ok(None) };
    Ok(Some(id.split_whitespace().next().context("an id")?.parse()?))
}
