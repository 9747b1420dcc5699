//! Attaching by a `bpf_link`, which the kernel ends with its owner, and dealing with the program that
//! may be on the interface already.

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use libbpf_rs::libbpf_sys;
use libbpf_rs::query::{LinkInfoIter, LinkTypeInfo, ProgInfoIter};
use libbpf_rs::{Xdp, XdpFlags};

/// Where in the receive path the program runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AttachMode {
    /// In the network driver, before an skb exists.
    Native,
    /// After the kernel has made an skb: every driver.
    Generic,
}

impl AttachMode {
    const fn flags(self) -> u32 {
        match self {
            Self::Native => libbpf_sys::XDP_FLAGS_DRV_MODE,
            Self::Generic => libbpf_sys::XDP_FLAGS_SKB_MODE,
        }
    }
}

/// A program that is on an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attached {
    /// The kernel's id of it.
    pub id: u32,
    /// Its name (15 characters at most); empty when it has none.
    pub name: String,
    /// Where it runs.
    pub mode: AttachMode,
}

/// Why the program could not be attached.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// Another program is there.
    #[error("XDP program {:?} (id {}) is attached already", .0.name, .0.id)]
    Foreign(Attached),
    /// The kernel refused.
    #[error(transparent)]
    System(#[from] io::Error),
}

/// The program that is on interface `ifindex` of the calling thread's network namespace. A query says
/// nothing about `ours`, but libbpf-rs wants a program to ask with.
pub(crate) fn attached(ours: BorrowedFd<'_>, ifindex: u32) -> io::Result<Option<Attached>> {
    let index = c_int::try_from(ifindex).map_err(|_| io::ErrorKind::InvalidInput)?;
    let found = Xdp::new(ours).query(index, XdpFlags::NONE).map_err(|error| system(&error))?;
    let candidates = [
        (found.drv_prog_id, AttachMode::Native),
        (found.hw_prog_id, AttachMode::Native),
        (found.skb_prog_id, AttachMode::Generic),
    ];
    let there = candidates.into_iter().find(|(id, _)| *id != 0);
    Ok(there.map(|(id, mode)| Attached { id, name: program_name(id), mode }))
}

pub(crate) fn attach(
    program: BorrowedFd<'_>,
    ifindex: u32,
    mode: AttachMode,
    replace: bool,
) -> Result<OwnedFd, AttachError> {
    if let Some(there) = attached(program, ifindex)? {
        if !replace {
            return Err(AttachError::Foreign(there));
        }
        detach_foreign(program, ifindex, &there)?;
    }
    create_link(program, ifindex, mode).map_err(|error| match attached(program, ifindex) {
        // Somebody was faster.
        Ok(Some(there)) => AttachError::Foreign(there),
        _ => AttachError::System(error),
    })
}

#[expect(unsafe_code, reason = "libbpf-rs attaches links without a choice of mode")]
fn create_link(program: BorrowedFd<'_>, ifindex: u32, mode: AttachMode) -> io::Result<OwnedFd> {
    let target = c_int::try_from(ifindex).map_err(|_| io::ErrorKind::InvalidInput)?;
    let options = libbpf_sys::bpf_link_create_opts {
        sz: size_of::<libbpf_sys::bpf_link_create_opts>() as libbpf_sys::size_t,
        flags: mode.flags(),
        ..Default::default()
    };
    // SAFETY: `options` is initialised, carries its own size and outlives the call.
    let fd = unsafe {
        libbpf_sys::bpf_link_create(program.as_raw_fd(), target, libbpf_sys::BPF_XDP, &raw const options)
    };
    owned(fd)
}

/// Takes somebody else's program off: by its link when it has one (the kernel refuses otherwise).
fn detach_foreign(program: BorrowedFd<'_>, ifindex: u32, there: &Attached) -> io::Result<()> {
    // Interface indices repeat across network namespaces, program ids do not.
    let its_link = LinkInfoIter::default().find(|link| {
        link.prog_id == there.id && matches!(&link.info, LinkTypeInfo::Xdp(xdp) if xdp.ifindex == ifindex)
    });
    if let Some(link) = its_link {
        return detach_link(link.id);
    }
    let flags = match there.mode {
        AttachMode::Native => XdpFlags::DRV_MODE,
        AttachMode::Generic => XdpFlags::SKB_MODE,
    };
    let index = c_int::try_from(ifindex).map_err(|_| io::ErrorKind::InvalidInput)?;
    Xdp::new(program).detach(index, flags).map_err(|error| system(&error))
}

#[expect(unsafe_code, reason = "libbpf-rs looks up no links by id")]
fn detach_link(id: u32) -> io::Result<()> {
    // SAFETY: takes and returns plain numbers.
    let link = owned(unsafe { libbpf_sys::bpf_link_get_fd_by_id(id) })?;
    detach(link.as_fd())
}

/// Takes a link's program off its interface at once, whoever else holds the link.
#[expect(unsafe_code, reason = "libbpf-rs detaches only links that it made")]
pub(crate) fn detach(link: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: `link` is an open descriptor for the whole call.
    match unsafe { libbpf_sys::bpf_link_detach(link.as_raw_fd()) } {
        0.. => Ok(()),
        error => Err(io::Error::from_raw_os_error(-error)),
    }
}

/// A descriptor from libbpf, which returns the negative errno when it has none.
#[expect(unsafe_code, reason = "takes ownership of a descriptor from C")]
fn owned(fd: c_int) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::from_raw_os_error(-fd));
    }
    // SAFETY: libbpf has just opened this descriptor for us, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

pub(crate) fn program_id(program: BorrowedFd<'_>) -> Option<u32> {
    // The kernel tells a program's id in the descriptor's fdinfo, without another unsafe call.
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", program.as_raw_fd())).ok()?;
    info.lines().find_map(|line| line.strip_prefix("prog_id:")?.trim().parse().ok())
}

fn program_name(id: u32) -> String {
    let info = ProgInfoIter::default().find(|info| info.id == id);
    info.map(|info| info.name.to_string_lossy().into_owned()).unwrap_or_default()
}

fn system(error: &libbpf_rs::Error) -> io::Error {
    use std::error::Error;
    let mut cause: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(one) = cause {
        if let Some(errno) = one.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error) {
            return io::Error::from_raw_os_error(errno);
        }
        cause = one.source();
    }
    io::Error::other(error.to_string())
}
