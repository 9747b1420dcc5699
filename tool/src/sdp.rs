//! `xwarp sdp`: runs an unmodified program with its TCP connections over SDP, by preloading `libxwarp-sdp.so`.

use std::{
    env,
    ffi::OsString,
    fs, io,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};

use crate::{
    device::check_or_shared,
    program::{NotStarted, obstacle, preload, say},
};

/// Names of the library: as it is installed, and as cargo builds it.
const LIBRARIES: [&str; 2] = ["libxwarp-sdp.so", "libxwarp_sdp_preload.so"];
/// Directories with the library, relative to that of this program.
const DIRECTORIES: [&str; 4] = ["", "../lib", "../lib/xwarp", "deps"];

/// How a program is run.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The library; `None` looks beside this program.
    pub library: Option<PathBuf>,
    /// The interface, where there are several.
    pub device: Option<String>,
    /// The file with the rules.
    pub rules: Option<PathBuf>,
    /// SDP only, without rules.
    pub only: bool,
    /// Print at the end how many bytes were transferred by RDMA.
    pub statistics: bool,
    /// A directory in which the frames of each process are recorded.
    pub capture: Option<PathBuf>,
}

/// Replaces this process by `program`. Returns only if that fails.
pub fn run(options: &Options, program: &[OsString]) -> Result<()> {
    let name = program.first().context("no program")?;
    if let Some(device) = &options.device {
        check_or_shared(device)?;
    }
    if let Some(found) = obstacle(name) {
        if options.only {
            return Err(NotStarted::Refused(format!("{found}: its connections cannot be SDP only")).into());
        }
        say(&format!("{found}: its connections stay with TCP"));
    }
    let cause = command(options, program)?.exec();
    Err(NotStarted::Exec { program: name.clone(), cause }.into())
}

/// The command that runs `program`.
fn command(options: &Options, program: &[OsString]) -> io::Result<Command> {
    let (name, arguments) = program.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    let library = match &options.library {
        Some(library) => library.clone(),
        None => find_library()?,
    };
    let mut command = Command::new(name);
    command.args(arguments).env("LD_PRELOAD", preload(fs::canonicalize(library)?));
    if let Some(device) = &options.device {
        command.env("XWARP_SDP_DEVICE", device);
    }
    if let Some(rules) = &options.rules {
        command.env("LIBSDP_CONFIG_FILE", fs::canonicalize(rules)?);
    }
    if options.only {
        command.env("SIMPLE_LIBSDP", "1");
    }
    if options.statistics {
        command.env("XWARP_SDP_STATISTICS", "1");
    }
    if let Some(capture) = &options.capture {
        command.env("XWARP_SDP_CAPTURE", fs::canonicalize(capture)?);
    }
    Ok(command)
}

fn find_library() -> io::Result<PathBuf> {
    let executable = env::current_exe()?;
    let beside = executable.parent().unwrap_or(Path::new("/"));
    let places = DIRECTORIES.iter().flat_map(|dir| LIBRARIES.map(|name| beside.join(dir).join(name)));
    places.into_iter().find(|path| path.exists()).ok_or_else(|| {
        let text = format!("{} is not in {} nor in its ../lib", LIBRARIES[0], beside.display());
        io::Error::new(io::ErrorKind::NotFound, text)
    })
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use super::*;

    #[test]
    fn options_become_environment() {
        let library = env::current_exe().unwrap();
        let options = Options {
            library: Some(library.clone()),
            device: Some("eth1".into()),
            only: true,
            capture: Some("/".into()),
            ..Options::default()
        };
        let command = command(&options, &["echo".into(), "hello".into()]).unwrap();
        let value = |name: &str| {
            command.get_envs().find(|(key, _)| *key == name).and_then(|(_, value)| value.map(OsStr::to_owned))
        };
        assert!(value("LD_PRELOAD").unwrap().to_string_lossy().starts_with(library.to_str().unwrap()));
        assert_eq!(value("XWARP_SDP_DEVICE"), Some("eth1".into()));
        assert_eq!(value("SIMPLE_LIBSDP"), Some("1".into()));
        assert_eq!(value("XWARP_SDP_CAPTURE"), Some("/".into()));
        assert_eq!(value("LIBSDP_CONFIG_FILE"), None);
        assert_eq!(command.get_args().collect::<Vec<_>>(), ["hello"]);
    }
}
