//! `xwarp run`: starts a program of libibverbs and librdmacm over xwarp.
//!
//! The dynamic linker finds both libraries in a directory of links to one file, which is searched before the distribution's
//! directories (`LD_LIBRARY_PATH`).

use std::{
    env,
    ffi::OsString,
    fs,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    io,
    os::unix::{
        fs::{DirBuilderExt as _, MetadataExt as _, symlink},
        process::CommandExt as _,
    },
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail, ensure};
use clap::{ValueEnum as _, builder::PossibleValue};
use rustix::process::getuid;
use xwarp_leg::place::{self, Place};

use crate::{
    device,
    program::{NotStarted, obstacle, preload, say},
    sysfs,
};

pub use crate::sysfs::Face;

/// The target of the links.
const LIBRARY: &str = "libxwarp_compat.so";
/// The names under which the dynamic linker looks for it, and one for `LD_PRELOAD`.
const NAMES: [&str; 3] = ["libibverbs.so.1", "librdmacm.so.1", PRELOADED];
const PRELOADED: &str = "libxwarp-preload.so";
/// The directory of links, beside the library.
const DIRECTORY: &str = "xwarp-libraries";
/// The directory of a user's temporary files, which nobody else may write.
const RUNTIME_VARIABLE: &str = "XDG_RUNTIME_DIR";
/// The interfaces that are devices.
pub const DEVICES_VARIABLE: &str = "XWARP_DEVICES";
/// `1`: another owner's XDP program on an interface is replaced.
const REPLACE_VARIABLE: &str = "XWARP_REPLACE_PROGRAM";
/// The kind of device that the program sees.
const FACE_VARIABLE: &str = "XWARP_AS";
/// The path of the library, if it is not beside this program.
pub const LIBRARY_VARIABLE: &str = "XWARP_LIBRARY";

/// How a program is run.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The interfaces that are devices; none: every suitable one.
    pub devices: Vec<String>,
    /// Another owner's XDP program on an interface is replaced.
    pub replace_program: bool,
    /// The fabric, and the host of it, that is the only device.
    pub fabric: Option<Fabric>,
    /// The kind of device that the program sees; `None`: as the environment says.
    pub face: Option<Face>,
    /// `/sys/class/infiniband` and `/dev/infiniband` list the devices.
    pub sysfs: bool,
}

/// The host of a fabric that a program is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fabric {
    /// The fabric's name.
    pub name: String,
    /// The host's name; `None`: `localhost`.
    pub host: Option<String>,
}

impl Fabric {
    /// Starts the fabric if it does not run, adds the host to its table, and puts both into the environment of `command`.
    pub fn enter(&self, command: &mut Command) -> Result<()> {
        let Self { name, host } = self;
        if env::var_os(place::PROGRAM_VARIABLE).is_none() {
            command.env(place::PROGRAM_VARIABLE, env::current_exe()?);
        }
        let place = Place::of(Some(name))?;
        let host = host.as_deref().unwrap_or_default();
        xwarp_leg::fabric::Fabric::connect(&place)?.host(host, true)?;
        command.env(place::NAME_VARIABLE, name).env(place::HOST_VARIABLE, host);
        Ok(())
    }
}

/// The path of the library: from the environment, beside this program, or in `../lib/xwarp`.
fn library() -> Result<PathBuf> {
    if let Some(path) = env::var_os(LIBRARY_VARIABLE) {
        return fs::canonicalize(&path).with_context(|| format!("{LIBRARY_VARIABLE}={}", path.display()));
    }
    let program = env::current_exe()?;
    let beside = program.parent().unwrap_or(Path::new("/"));
    let places = [beside.join(LIBRARY), beside.join("../lib/xwarp").join(LIBRARY)];
    match places.iter().find_map(|place| fs::canonicalize(place).ok()) {
        Some(path) => Ok(path),
        None => bail!("{LIBRARY} is neither in {} nor where {LIBRARY_VARIABLE} says", beside.display()),
    }
}

/// The directory of links, which is made if it is missing: beside the library, or where this user may write.
fn links(library: &Path) -> Result<PathBuf> {
    let beside = library.with_file_name(DIRECTORY);
    let target = Path::new("..").join(library.file_name().unwrap_or_default());
    if make_links(&beside, &target).is_ok() {
        return Ok(beside);
    }
    let own = own_directory(library)?;
    make_links(&own, library).with_context(|| format!("cannot create links in {}", own.display()))?;
    Ok(own)
}

/// Makes missing links. Other processes may do the same at this moment.
fn make_links(directory: &Path, target: &Path) -> io::Result<()> {
    for name in NAMES {
        let link = directory.join(name);
        let is_made = || fs::read_link(&link).is_ok_and(|found| found == target);
        if is_made() {
            continue;
        }
        fs::create_dir_all(directory)?;
        if symlink(target, &link).is_err() && !is_made() {
            // A link to somewhere else is replaced in one step.
            let new = directory.join(format!(".{name}-{}", std::process::id()));
            symlink(target, &new)?;
            fs::rename(&new, &link)?;
        }
    }
    Ok(())
}

/// A directory for the links to this library that belongs to this user, and that nobody else may write.
fn own_directory(library: &Path) -> Result<PathBuf> {
    let mut hasher = DefaultHasher::new();
    library.hash(&mut hasher);
    let user = getuid().as_raw();
    let base = env::var_os(RUNTIME_VARIABLE).map(PathBuf::from).filter(|base| base.is_dir());
    let directory =
        base.unwrap_or_else(env::temp_dir).join(format!("xwarp-libraries-{user}-{:016x}", hasher.finish()));
    match fs::DirBuilder::new().mode(0o700).create(&directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(error).with_context(|| format!("cannot create {}", directory.display()));
        }
        _ => {}
    }
    let found = fs::symlink_metadata(&directory)?;
    let is_own = found.is_dir() && found.uid() == user && found.mode() & 0o022 == 0;
    ensure!(is_own, "{} is not a directory that only this user may write: remove it", directory.display());
    Ok(directory)
}

/// Preloads our library: the names and addresses of a fabric's hosts come from functions of the C library, which programs that load
/// our library later than libc do not find in it.
fn add_preloaded(command: &mut Command, library: PathBuf) {
    command.env("LD_PRELOAD", preload(library));
    // The runtime of gcc's AddressSanitizer ends programs with a library before it.
    let mut options = OsString::from("verify_asan_link_order=0");
    if let Some(others) = env::var_os("ASAN_OPTIONS") {
        options.push(":");
        options.push(others);
    }
    command.env("ASAN_OPTIONS", options);
}

/// Replaces this process by `program`, with `devices` as its only RDMA devices unless there are none. Returns only if that fails.
pub fn run(options: &Options, program: &[OsString]) -> Result<()> {
    let Options { devices, replace_program, fabric, face, sysfs } = options;
    let [name, arguments @ ..] = program else { bail!("no program") };
    for device in named(devices) {
        device::check(&device)?;
    }
    let directory = links(&library()?)?;
    let obstacle = obstacle(name);
    if let Some(found) = &obstacle {
        if let Some(remedy) = found.remedy() {
            return Err(NotStarted::Refused(format!("{found}: {remedy}")).into());
        }
        // It may be a launcher of other programs, which inherit the environment.
        say(&format!("{found}: it cannot load the drop-in libraries"));
    }
    let preloaded = directory.join(PRELOADED);
    let mut paths = directory.into_os_string();
    if let Some(before) = env::var_os("LD_LIBRARY_PATH").filter(|before| !before.is_empty()) {
        paths.push(":");
        paths.push(before);
    }
    let mut command = Command::new(name);
    command.args(arguments).env("LD_LIBRARY_PATH", paths);
    if !devices.is_empty() {
        command.env(DEVICES_VARIABLE, devices.join(","));
    }
    if let Some(fabric) = fabric {
        fabric.enter(&mut command)?;
        if !obstacle.is_some_and(|found| found.forbids_preload()) {
            add_preloaded(&mut command, preloaded);
        }
    }
    if *replace_program {
        command.env(REPLACE_VARIABLE, "1");
    }
    if let Some(face) = face {
        let word = face.to_possible_value();
        command.env(FACE_VARIABLE, word.as_ref().map_or("", PossibleValue::get_name));
    }
    if *sysfs {
        sysfs::enter(&named(devices), face.unwrap_or_else(inherited_face))?;
    }
    let cause = command.exec();
    Err(NotStarted::Exec { program: name.clone(), cause }.into())
}

/// The kind of device that the environment names, as our library reads it.
fn inherited_face() -> Face {
    env::var(FACE_VARIABLE).ok().and_then(|word| Face::from_str(&word, false).ok()).unwrap_or_default()
}

/// The interfaces that the user names as devices: in options, else in the environment.
fn named(devices: &[String]) -> Vec<String> {
    if !devices.is_empty() {
        return devices.to_vec();
    }
    let list = env::var(DEVICES_VARIABLE).unwrap_or_default();
    list.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect()
}
