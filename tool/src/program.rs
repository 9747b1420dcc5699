//! The file of a program that is to run with a library of ours: whether the dynamic linker will load the library, and the status
//! for a program that does not start.

use std::{
    env,
    ffi::{OsStr, OsString},
    fmt, fs, io,
    os::unix::{
        ffi::OsStrExt as _,
        fs::{MetadataExt as _, PermissionsExt as _},
    },
    path::{Path, PathBuf},
};

use rustix::{
    fs::{StatVfsMountFlags, getxattr, statvfs},
    process::{getgid, getuid},
    thread::no_new_privs,
};

/// Bytes of a program's file that are read.
const MAX_HEADER_BYTES: u64 = 4096;
/// Interpreters of interpreters that are followed; the kernel follows as many.
const MAX_INTERPRETERS: usize = 5;
/// Status of shells for a program that is found but cannot be run.
const CANNOT_RUN: u8 = 126;
/// Status of shells for a program that is not found.
const NOT_FOUND: u8 = 127;

/// Why the dynamic linker loads no library of ours into a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Obstacle {
    /// The program has no dynamic linker.
    Static,
    /// Its dynamic linker is that of another C library, at this path.
    OtherLibc(PathBuf),
    /// It is built for another kind of processor or another word size.
    OtherMachine,
    /// It runs with its owner's or group's rights. The dynamic linker then ignores `LD_LIBRARY_PATH` and `LD_PRELOAD`.
    SetId,
    /// It gets capabilities from its file. The dynamic linker then ignores these variables too.
    Capabilities,
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Static => f.write_str("is linked statically"),
            Self::OtherLibc(linker) => write!(f, "uses another C library than glibc ({})", linker.display()),
            Self::OtherMachine => f.write_str("is built for another kind of processor"),
            Self::SetId => f.write_str("runs with its owner's rights (set-user-ID or set-group-ID)"),
            Self::Capabilities => f.write_str("gets capabilities from its file (setcap)"),
        }
    }
}

/// An obstacle, and the file that has it: the program, or the interpreter of a script.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    file: PathBuf,
    obstacle: Obstacle,
}

impl Found {
    /// Whether a library that is preloaded ends the program: the dynamic linker of musl loads it, and does not find its symbols.
    pub fn forbids_preload(&self) -> bool {
        matches!(self.obstacle, Obstacle::OtherLibc(_))
    }

    /// The remedy for a file that gains privileges, for which the linker removes our variables also from the environment of
    /// further programs. `None` for the other obstacles: programs that this one starts may load the library.
    pub fn remedy(&self) -> Option<String> {
        let file = self.file.display();
        let remove = match self.obstacle {
            Obstacle::SetId => format!("run a copy without these bits (or chmod ug-s {file})"),
            Obstacle::Capabilities => format!("remove them (setcap -r {file})"),
            Obstacle::Static | Obstacle::OtherLibc(_) | Obstacle::OtherMachine => return None,
        };
        Some(format!(
            "the dynamic linker then ignores our library: {remove}; {}",
            xwarp_driver::RIGHTS_OF_A_USER
        ))
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.file.display(), self.obstacle)
    }
}

/// Why a program was not started.
#[derive(Debug, thiserror::Error)]
pub enum NotStarted {
    /// The kernel cannot run it.
    #[error("cannot run {}: {cause}", program.display())]
    Exec {
        /// The program.
        program: OsString,
        /// The kernel's error.
        cause: io::Error,
    },
    /// Our library would have no effect.
    #[error("{0}")]
    Refused(String),
}

impl NotStarted {
    /// The status that a shell returns for it.
    pub fn status(&self) -> u8 {
        match self {
            Self::Exec { cause, .. } if cause.kind() == io::ErrorKind::NotFound => NOT_FOUND,
            Self::Exec { .. } | Self::Refused(_) => CANNOT_RUN,
        }
    }
}

/// Prints a line on standard error in one write, which no other process's line can interrupt.
pub fn say(line: &str) {
    // There is no other place where the error of this could be shown.
    let _ = io::Write::write_all(&mut io::stderr(), format!("xwarp: {line}\n").as_bytes());
}

/// The value of `LD_PRELOAD` with `library` before the libraries that it names already.
pub fn preload(library: PathBuf) -> OsString {
    let mut list = library.into_os_string();
    if let Some(others) = env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        list.push(":");
        list.push(others);
    }
    list
}

/// The obstacle to loading a library into `program`, which is searched in `PATH`, or into the interpreter of a script.
pub fn obstacle(program: &OsStr) -> Option<Found> {
    let mut file = locate(program)?;
    for _ in 0..MAX_INTERPRETERS {
        // Not everybody who may run a program may read it.
        let header = beginning(&file).unwrap_or_default();
        let Some(line) = header.strip_prefix(b"#!") else {
            let obstacle = if gains_rights(&file)? {
                Obstacle::SetId
            } else if gains_capabilities(&file) {
                Obstacle::Capabilities
            } else {
                obstacle_of_linking(&header)?
            };
            return Some(Found { file, obstacle });
        };
        // Neither bits nor capabilities of a script's file have an effect.
        file = interpreter(line)?;
    }
    None
}

fn locate(program: &OsStr) -> Option<PathBuf> {
    if program.as_encoded_bytes().contains(&b'/') {
        return Some(program.into());
    }
    let is_program = |path: &PathBuf| {
        fs::metadata(path).is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
    };
    env::split_paths(&env::var_os("PATH")?).map(|directory| directory.join(program)).find(is_program)
}

fn beginning(file: &Path) -> Option<Vec<u8>> {
    let mut header = Vec::new();
    let file = fs::File::open(file).ok()?;
    io::Read::read_to_end(&mut io::Read::take(file, MAX_HEADER_BYTES), &mut header).ok()?;
    Some(header)
}

/// The program that runs a script, by the rest of its first line. `env` runs its first argument that is no option and no variable.
fn interpreter(line: &[u8]) -> Option<PathBuf> {
    let line = line.split(|byte| *byte == b'\n').next()?;
    let mut words =
        line.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty()).map(OsStr::from_bytes);
    let first = Path::new(words.next()?);
    if first.file_name() != Some("env".as_ref()) {
        return Some(first.to_owned());
    }
    let is_argument = |word: &&OsStr| !word.as_bytes().starts_with(b"-") && !word.as_bytes().contains(&b'=');
    words.find(is_argument).and_then(locate)
}

/// Whether the kernel changes the user or group of a process that runs this file.
fn gains_rights(file: &Path) -> Option<bool> {
    let found = fs::metadata(file).ok()?;
    let mode = found.permissions().mode();
    let user = mode & 0o4000 != 0 && found.uid() != getuid().as_raw();
    // Without the group's right to execute, this bit means something else.
    let group = mode & 0o2010 == 0o2010 && found.gid() != getgid().as_raw();
    Some((user || group) && !is_on_nosuid_mount(file) && !no_new_privs().unwrap_or(false))
}

/// Whether the kernel gives a process that runs this file capabilities that it did not have. Root has them.
fn gains_capabilities(file: &Path) -> bool {
    // Flags and version, then pairs of permitted and inheritable capabilities.
    let mut value = [0; 64];
    let Ok(len) = getxattr(file, "security.capability", &mut value) else { return false };
    let has_some = value.get(4..len).is_some_and(|sets| sets.iter().take(16).any(|byte| *byte != 0));
    // This does not depend on no_new_privs: the dynamic linker is warned though the process gets nothing.
    has_some && !getuid().is_root() && !is_on_nosuid_mount(file)
}

fn is_on_nosuid_mount(file: &Path) -> bool {
    statvfs(file).is_ok_and(|found| found.f_flag.contains(StatVfsMountFlags::NOSUID))
}

/// The obstacle in the header of a program's file. `None`: there is none, or the file is no ELF file.
fn obstacle_of_linking(header: &[u8]) -> Option<Obstacle> {
    if !header.starts_with(b"\x7fELF") {
        return None;
    }
    let own = beginning(Path::new("/proc/self/exe"))?;
    if kind(header)? != kind(&own)? {
        return Some(Obstacle::OtherMachine);
    }
    let linker = linker(header)?;
    if linker.as_os_str().is_empty() {
        return Some(Obstacle::Static);
    }
    let name = linker.file_name().unwrap_or_default().as_bytes();
    let is_glibc = [&b"ld-linux"[..], b"ld64.so", b"ld.so"].iter().any(|known| name.starts_with(known));
    (!is_glibc).then_some(Obstacle::OtherLibc(linker))
}

/// Word size, byte order and processor of an ELF file.
fn kind(file: &[u8]) -> Option<(&[u8], &[u8])> {
    Some((file.get(4..6)?, file.get(18..20)?))
}

/// The dynamic linker that a 64-bit ELF file names in its program header `PT_INTERP`; an empty path if it names none. `None`: its
/// headers are not among these bytes.
fn linker(file: &[u8]) -> Option<PathBuf> {
    const PT_INTERP: u64 = 3;
    let number = |at: usize, len: usize| {
        let bytes = file.get(at..at.checked_add(len)?)?;
        let fold = |n: u64, byte: &u8| n << 8 | u64::from(*byte);
        let is_big_endian = file.get(5) == Some(&2);
        Some(if is_big_endian { bytes.iter().fold(0, fold) } else { bytes.iter().rev().fold(0, fold) })
    };
    let (table, size, count) = (number(0x20, 8)?, number(0x36, 2)?, number(0x38, 2)?);
    for index in 0..count {
        let at = usize::try_from(table.checked_add(index * size)?).ok()?;
        if number(at, 4)? == PT_INTERP {
            let begin = usize::try_from(number(at.checked_add(8)?, 8)?).ok()?;
            let path = file.get(begin..)?.split(|byte| *byte == 0).next()?;
            return Some(Path::new(OsStr::from_bytes(path)).to_owned());
        }
    }
    Some(PathBuf::new())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file with one program header of this kind, which names `path`.
    fn elf(kind: u32, path: &[u8]) -> Vec<u8> {
        let mut file = beginning(Path::new("/proc/self/exe")).unwrap()[..64].to_vec();
        file.resize(64 + 56, 0);
        file[0x20..0x28].copy_from_slice(&64_u64.to_ne_bytes());
        file[0x36..0x3a].copy_from_slice(&[56_u16.to_ne_bytes(), 1_u16.to_ne_bytes()].concat());
        file[64..68].copy_from_slice(&kind.to_ne_bytes());
        file[72..80].copy_from_slice(&120_u64.to_ne_bytes());
        file.extend(path);
        file.push(0);
        file
    }

    #[test]
    fn programs_without_glibc_are_recognised() {
        let glibc = elf(3, b"/lib64/ld-linux-x86-64.so.2");
        assert_eq!(obstacle_of_linking(&glibc), None);
        let musl = b"/lib/ld-musl-x86_64.so.1";
        let other = Obstacle::OtherLibc(OsStr::from_bytes(musl).into());
        assert_eq!(obstacle_of_linking(&elf(3, musl)), Some(other));
        assert_eq!(obstacle_of_linking(&elf(1, b"")), Some(Obstacle::Static));
        assert_eq!(obstacle_of_linking(b"#!/bin/sh\n"), None);
        let mut foreign = glibc.clone();
        foreign[18] ^= 0xff;
        assert_eq!(obstacle_of_linking(&foreign), Some(Obstacle::OtherMachine));
        for len in 0..68 {
            assert_eq!(obstacle_of_linking(&glibc[..len]), None, "{len} bytes");
        }
        let mut far = glibc;
        far[0x27] = 0xff;
        assert_eq!(obstacle_of_linking(&far), None);
    }

    #[test]
    fn scripts_name_their_interpreters() {
        assert_eq!(interpreter(b" /bin/sh -e\necho"), Some("/bin/sh".into()));
        for line in [&b"/usr/bin/env sh"[..], b"/usr/bin/env -S A=1 sh -e"] {
            assert!(interpreter(line).unwrap().ends_with("sh"), "{line:?}");
        }
        assert_eq!(interpreter(b"\n"), None);
    }

    #[test]
    fn ordinary_programs_have_no_obstacle() {
        assert_eq!(obstacle(env::current_exe().unwrap().as_os_str()), None);
        assert_eq!(obstacle("sh".as_ref()), None);
        assert_eq!(obstacle("no-such-program".as_ref()), None);
    }
}
