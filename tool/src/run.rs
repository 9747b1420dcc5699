//! `xwarp run`: starts a program of libibverbs and librdmacm over xwarp.
//!
//! The dynamic linker finds both libraries in a directory of links to one file, which is searched before the distribution's
//! directories (`LD_LIBRARY_PATH`).

use std::{
    ffi::OsString,
    fs, io,
    os::unix::{fs::symlink, process::CommandExt as _},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};

/// The target of the links.
const LIBRARY: &str = "libxwarp_compat.so";
/// The names under which the dynamic linker looks for it, and one for `LD_PRELOAD`.
const NAMES: [&str; 3] = ["libibverbs.so.1", "librdmacm.so.1", "libxwarp-preload.so"];
/// The directory of links, beside the library.
const DIRECTORY: &str = "xwarp-libraries";
/// The interfaces that are devices.
pub const DEVICES_VARIABLE: &str = "XWARP_DEVICES";
/// The path of the library, if it is not beside this program.
pub const LIBRARY_VARIABLE: &str = "XWARP_LIBRARY";

/// The path of the library: from the environment, beside this program, or in `../lib/xwarp`.
fn library() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os(LIBRARY_VARIABLE) {
        return fs::canonicalize(&path).with_context(|| format!("{LIBRARY_VARIABLE}={}", path.display()));
    }
    let program = std::env::current_exe()?;
    let beside = program.parent().unwrap_or(Path::new("/"));
    let places = [beside.join(LIBRARY), beside.join("../lib/xwarp").join(LIBRARY)];
    match places.iter().find_map(|place| fs::canonicalize(place).ok()) {
        Some(path) => Ok(path),
        None => bail!("{LIBRARY} is neither in {} nor where {LIBRARY_VARIABLE} says", beside.display()),
    }
}

/// Makes the directory of links if it is missing.
fn links(library: &Path) -> Result<PathBuf> {
    let directory = library.with_file_name(DIRECTORY);
    let make = || -> io::Result<()> {
        for name in NAMES {
            let link = directory.join(name);
            if fs::read_link(&link).is_ok_and(|target| target == Path::new("..").join(LIBRARY)) {
                continue;
            }
            fs::create_dir_all(&directory)?;
            match symlink(Path::new("..").join(LIBRARY), &link) {
                // Another process was faster.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                made => made?,
            }
        }
        Ok(())
    };
    let hint = "run `xwarp run true` once as the owner of its directory";
    make().with_context(|| format!("cannot create the links in {}: {hint}", directory.display()))?;
    Ok(directory)
}

/// Replaces this process by `program`, with `devices` as its only RDMA devices unless there are none. Returns only if that fails.
pub fn run(devices: &[String], program: &[OsString]) -> Result<()> {
    let [name, arguments @ ..] = program else { bail!("no program") };
    let directory = links(&library()?)?;
    let mut paths = directory.into_os_string();
    if let Some(before) = std::env::var_os("LD_LIBRARY_PATH").filter(|before| !before.is_empty()) {
        paths.push(":");
        paths.push(before);
    }
    let mut command = Command::new(name);
    command.args(arguments).env("LD_LIBRARY_PATH", paths);
    if !devices.is_empty() {
        command.env(DEVICES_VARIABLE, devices.join(","));
    }
    Err(command.exec()).with_context(|| format!("cannot run {}", name.display()))
}
