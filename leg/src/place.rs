//! [`Place`]: where the fabric of a user is, and how it is started.

use std::env;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::process::geteuid;

/// The name of the fabric that is used if none is named.
pub const DEFAULT_NAME: &str = "default";
/// Environment variable with the name of the fabric that a program uses.
pub const NAME_VARIABLE: &str = "XWARP_FABRIC";
/// Environment variable with the name of the host that a program is.
pub const HOST_VARIABLE: &str = "XWARP_FABRIC_HOST";
/// Environment variable with the directory of sockets.
pub const DIRECTORY_VARIABLE: &str = "XWARP_FABRIC_DIRECTORY";
/// Environment variable with the program that is started as the fabric.
pub const PROGRAM_VARIABLE: &str = "XWARP_FABRIC_PROGRAM";
/// The directory of a user's sockets and temporary files.
const RUNTIME_VARIABLE: &str = "XDG_RUNTIME_DIR";
/// The program, beside the executable or in `PATH`.
const PROGRAM: &str = "xwarp";
/// Variables that change what the dynamic linker loads into the fabric.
const LINKERS: [&str; 2] = ["LD_LIBRARY_PATH", "LD_PRELOAD"];

/// Where a fabric is: the name of its socket in a directory that only its user may enter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    directory: PathBuf,
    name: String,
}

impl Place {
    /// The place of the fabric `name` of this user, whose directory is made if it is missing: that of the environment variable
    /// `XWARP_FABRIC_DIRECTORY`, else `xwarp` in `XDG_RUNTIME_DIR`, else `xwarp-UID` in the directory for temporary files.
    ///
    /// # Errors
    /// The name is no file name, or the directory is not one that belongs to this user and that nobody else may enter.
    pub fn of(name: Option<&str>) -> io::Result<Self> {
        let name = name.filter(|name| !name.is_empty()).unwrap_or(DEFAULT_NAME);
        let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if name.len() > 32 || name.starts_with('.') || !name.chars().all(fits) {
            let text =
                format!("{name:?} is no name of a fabric: letters, digits, '-', '_' and '.', at most 32");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        Ok(Self { directory: directory()?, name: name.to_owned() })
    }

    /// The fabric's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its socket.
    pub fn socket(&self) -> PathBuf {
        self.directory.join(format!("{}.sock", self.name))
    }

    /// A file that the serving process locks.
    pub fn lock(&self) -> PathBuf {
        self.directory.join(format!("{}.lock", self.name))
    }

    /// What the serving process has to say.
    pub fn log(&self) -> PathBuf {
        self.directory.join(format!("{}.log", self.name))
    }

    /// Starts the fabric, and waits until it serves. Does nothing if it serves already.
    ///
    /// # Errors
    /// The program `xwarp` is not found, or fails.
    pub fn start(&self) -> io::Result<()> {
        let program = program()?;
        let mut command = Command::new(&program);
        command.args(["fabric", "start", "--name", &self.name]);
        // The fabric serves other programs too.
        for variable in LINKERS {
            command.env_remove(variable);
        }
        command.env(DIRECTORY_VARIABLE, &self.directory);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let failed = |text: &str| io::Error::other(format!("{} fabric start: {text}", program.display()));
        let ended = command.output().map_err(|error| failed(&error.to_string()))?;
        if ended.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&ended.stderr);
        Err(failed(said.lines().last().unwrap_or("it failed")))
    }
}

/// The directory of this user's fabrics.
fn directory() -> io::Result<PathBuf> {
    let user = geteuid().as_raw();
    let named = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let runtime =
        named(RUNTIME_VARIABLE).filter(|base| fs::metadata(base).is_ok_and(|found| found.uid() == user));
    let directory = named(DIRECTORY_VARIABLE)
        .or_else(|| runtime.map(|base| base.join("xwarp")))
        .unwrap_or_else(|| env::temp_dir().join(format!("xwarp-{user}")));
    check(&directory, user)?;
    Ok(directory)
}

/// Makes a directory that is missing, and refuses one in which another user could put a socket of its own.
fn check(directory: &Path, user: u32) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            let text = format!("cannot create {}: {error}", directory.display());
            return Err(io::Error::new(error.kind(), text));
        }
        _ => {}
    }
    let found = fs::symlink_metadata(directory)?;
    if found.is_dir() && found.uid() == user && found.mode().trailing_zeros() >= 6 {
        return Ok(());
    }
    let text = format!(
        "{} is not a directory of this user alone (mode 0700): remove it, or name another in {DIRECTORY_VARIABLE}",
        directory.display()
    );
    Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
}

/// The program to start: named by the environment, beside this executable, one directory above it, or in `PATH`.
fn program() -> io::Result<PathBuf> {
    if let Some(named) = env::var_os(PROGRAM_VARIABLE) {
        return Ok(named.into());
    }
    let executable = env::current_exe().unwrap_or_default();
    let beside = executable.ancestors().skip(1).take(2).map(Path::to_path_buf);
    let path = env::var_os("PATH").unwrap_or_default();
    let found = beside.chain(env::split_paths(&path)).map(|directory| directory.join(PROGRAM));
    found.into_iter().find(|program| program.is_file()).ok_or_else(|| {
        let text = format!(
            "no fabric runs, and the program {PROGRAM}, which would be started, is neither beside {} nor in PATH: install it \
             (cargo install xwarp-tool), or name it in {PROGRAM_VARIABLE}",
            executable.display()
        );
        io::Error::new(io::ErrorKind::NotFound, text)
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    #[test]
    fn names_are_file_names() {
        for name in ["a/b", "..", ".x", "a b", "0123456789012345678901234567890123"] {
            assert!(Place::of(Some(name)).is_err(), "{name}");
        }
    }

    #[test]
    fn a_directory_that_others_may_enter_is_refused() {
        let user = geteuid().as_raw();
        let base = env::temp_dir().join(format!("xwarp-place-{}", std::process::id()));
        let _ = fs::remove_dir_all(&base);
        let directory = base.join("inside");
        fs::create_dir(&base).unwrap();
        check(&directory, user).unwrap();
        check(&directory, user).unwrap();
        assert!(check(&directory, user + 1).is_err(), "of another user");
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o750)).unwrap();
        assert!(check(&directory, user).is_err(), "open to a group");
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o700)).unwrap();
        let link = base.join("link");
        symlink(&directory, &link).unwrap();
        assert!(check(&link, user).is_err(), "a link, which somebody may change");
        fs::remove_dir_all(&base).unwrap();
    }
}
