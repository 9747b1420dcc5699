//! `xwarp sdp`: runs an unmodified program with its TCP connections over SDP, by preloading `libxwarp-sdp.so`.

use std::{
    env,
    ffi::{OsStr, OsString},
    fs, io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

/// Names of the library: as it is installed, and as cargo builds it.
const LIBRARIES: [&str; 2] = ["libxwarp-sdp.so", "libxwarp_sdp_preload.so"];
/// Directories with the library, relative to that of this program.
const DIRECTORIES: [&str; 4] = ["", "../lib", "../lib/xwarp", "deps"];
/// Bytes of a program's file that are read to detect dynamic linking.
const MOST_HEADER_BYTES: usize = 4096;

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

/// The reason why a program's connections stay with kernel TCP although the library is preloaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Obstacle {
    /// No library can be preloaded.
    Static,
    /// The dynamic linker ignores libraries for programs with other privileges than their caller's.
    SetUid,
}

impl std::fmt::Display for Obstacle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Static => "is linked statically",
            Self::SetUid => "runs with its owner's rights (set-user-ID or set-group-ID)",
        })
    }
}

/// The command that runs `program`.
pub fn command(options: &Options, program: &[OsString]) -> io::Result<Command> {
    let (name, arguments) = program.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    let library = match &options.library {
        Some(library) => library.clone(),
        None => find_library()?,
    };
    let mut preload = fs::canonicalize(library)?.into_os_string();
    if let Some(others) = env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        preload.push(":");
        preload.push(others);
    }
    let mut command = Command::new(name);
    command.args(arguments).env("LD_PRELOAD", preload);
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

/// The obstacle to preloading the library into `program`, which is searched in `PATH`.
pub fn obstacle(program: &OsStr) -> Option<Obstacle> {
    let path = if program.as_encoded_bytes().contains(&b'/') {
        PathBuf::from(program)
    } else {
        let paths = env::var_os("PATH")?;
        env::split_paths(&paths).map(|dir| dir.join(program)).find(|path| path.is_file())?
    };
    let mode = fs::metadata(&path).ok()?.permissions().mode();
    if mode & 0o6000 != 0 {
        return Some(Obstacle::SetUid);
    }
    let mut header = Vec::new();
    let file = fs::File::open(&path).ok()?;
    io::Read::read_to_end(&mut io::Read::take(file, MOST_HEADER_BYTES as u64), &mut header).ok()?;
    (is_dynamic(&header) == Some(false)).then_some(Obstacle::Static)
}

/// Whether a program needs the dynamic linker, by the beginning of its file: whether a program header of a 64-bit ELF
/// file is `PT_INTERP`. `None`: not such a file, or its headers are elsewhere.
fn is_dynamic(file: &[u8]) -> Option<bool> {
    const PT_INTERP: u32 = 3;
    let bytes = |at: usize, len: usize| file.get(at..at.checked_add(len)?);
    let number = |at, len| {
        let big = file.get(5) == Some(&2);
        let fold = |n: u64, byte: &u8| n << 8 | u64::from(*byte);
        let bytes = bytes(at, len)?;
        Some(if big { bytes.iter().fold(0, fold) } else { bytes.iter().rev().fold(0, fold) })
    };
    if bytes(0, 5)? != b"\x7fELF\x02" {
        return None;
    }
    let (table, size, count) = (number(0x20, 8)?, number(0x36, 2)?, number(0x38, 2)?);
    for index in 0..count {
        let at = usize::try_from(table.checked_add(index * size)?).ok()?;
        if number(at, 4)? == u64::from(PT_INTERP) {
            return Some(true);
        }
    }
    Some(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file with one program header of this kind.
    fn elf(kind: u32) -> Vec<u8> {
        let mut file = vec![0; 64 + 56];
        file[..6].copy_from_slice(b"\x7fELF\x02\x01");
        file[0x20] = 64;
        (file[0x36], file[0x38]) = (56, 1);
        file[64..68].copy_from_slice(&kind.to_le_bytes());
        file
    }

    #[test]
    fn static_programs_are_recognised() {
        assert_eq!(is_dynamic(&elf(3)), Some(true));
        assert_eq!(is_dynamic(&elf(1)), Some(false));
        assert_eq!(is_dynamic(b"#!/bin/sh\n"), None);
        let file = elf(1);
        for len in 0..file.len() - 52 {
            assert_eq!(is_dynamic(&file[..len]), None, "{len} bytes");
        }
        let mut far = elf(3);
        far[0x27] = 0xff;
        assert_eq!(is_dynamic(&far), None);
    }

    #[test]
    fn obstacles_of_programs() {
        assert_eq!(obstacle(env::current_exe().unwrap().as_os_str()), None);
        assert_eq!(obstacle("no-such-program".as_ref()), None);
    }

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
