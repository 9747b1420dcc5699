//! Attaching the program by a `bpf_link`, which the kernel removes when its owner exits, and replacing
//! another owner's program.

use std::ffi::c_int;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use libbpf_rs::libbpf_sys;
use libbpf_rs::query::{LinkInfoIter, LinkTypeInfo, ProgInfoIter};
use libbpf_rs::{Xdp, XdpFlags};

use crate::holder::{self, Holder};

/// The place in the receive path where the program runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AttachMode {
    /// In the network driver, before an skb exists.
    Native,
    /// After the kernel has made a socket buffer: works with every driver.
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

/// A program that is attached to an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attached {
    /// Its id in the kernel.
    pub id: u32,
    /// Its name (15 characters at most); empty when it has none.
    pub name: String,
    /// Where it runs.
    pub mode: AttachMode,
    /// A process that holds it or its link; `None` if it is pinned, attached without a link, or not visible.
    pub holder: Option<Holder>,
}

/// Why the program could not be attached.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// Another program is attached.
    #[error("XDP program {:?} (id {}) is attached already", .0.name, .0.id)]
    Foreign(Attached),
    /// The kernel refused.
    #[error(transparent)]
    System(#[from] io::Error),
}

/// See [`attached_to`]. libbpf-rs needs any descriptor (`any`) for a query; the result does not depend on it.
pub(crate) fn attached(any: BorrowedFd<'_>, ifindex: u32) -> io::Result<Option<Attached>> {
    let index = c_int::try_from(ifindex).map_err(|_| io::ErrorKind::InvalidInput)?;
    let found = Xdp::new(any).query(index, XdpFlags::NONE).map_err(|error| system(&error))?;
    let candidates = [
        (found.drv_prog_id, AttachMode::Native),
        (found.hw_prog_id, AttachMode::Native),
        (found.skb_prog_id, AttachMode::Generic),
    ];
    let there = candidates.into_iter().find(|(id, _)| *id != 0);
    Ok(there.map(|(id, mode)| Attached { id, name: program_name(id), mode, holder: holder::of_program(id) }))
}

/// The program that is attached to interface `ifindex` of the calling thread's network namespace. Needs no privileges,
/// but without them the program's name and holder are unknown.
pub fn attached_to(ifindex: u32) -> io::Result<Option<Attached>> {
    attached(File::open("/dev/null")?.as_fd(), ifindex)
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
    create_link(program, ifindex, libbpf_sys::BPF_XDP, mode.flags()).map_err(|error| {
        match attached(program, ifindex) {
            // Another process attached its program after our check.
            Ok(Some(there)) => AttachError::Foreign(there),
            _ => AttachError::System(error),
        }
    })
}

/// Attaches to an interface that this process has made, and on which nobody else's program can be. Asking the kernel what is there
/// would return all interfaces of the namespace.
pub(crate) fn attach_to_own(
    program: BorrowedFd<'_>,
    ifindex: u32,
    mode: AttachMode,
) -> Result<OwnedFd, AttachError> {
    Ok(create_link(program, ifindex, libbpf_sys::BPF_XDP, mode.flags())?)
}

/// Attaches a tc program to the ingress of interface `ifindex` of the calling thread's network namespace, behind the
/// programs that are attached already.
pub(crate) fn attach_ingress(program: BorrowedFd<'_>, ifindex: u32) -> io::Result<OwnedFd> {
    create_link(program, ifindex, libbpf_sys::BPF_TCX_INGRESS, 0)
}

#[expect(unsafe_code, reason = "libbpf-rs attaches links without a choice of mode")]
fn create_link(program: BorrowedFd<'_>, ifindex: u32, place: u32, flags: u32) -> io::Result<OwnedFd> {
    let target = c_int::try_from(ifindex).map_err(|_| io::ErrorKind::InvalidInput)?;
    let options = libbpf_sys::bpf_link_create_opts {
        sz: size_of::<libbpf_sys::bpf_link_create_opts>() as libbpf_sys::size_t,
        flags,
        ..Default::default()
    };
    // SAFETY: `options` is initialised, carries its own size and outlives the call.
    let fd = unsafe { libbpf_sys::bpf_link_create(program.as_raw_fd(), target, place, &raw const options) };
    owned(fd)
}

/// Detaches another owner's program: by its link if it has one, because the kernel then rejects other ways.
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

/// Detaches a link's program at once, even if other processes hold the link.
#[expect(unsafe_code, reason = "libbpf-rs detaches only links that it made")]
pub(crate) fn detach(link: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: `link` is an open descriptor for the whole call.
    match unsafe { libbpf_sys::bpf_link_detach(link.as_raw_fd()) } {
        0.. => Ok(()),
        error => Err(io::Error::from_raw_os_error(-error)),
    }
}

/// Takes ownership of a descriptor from libbpf, which returns a negative errno on failure.
#[expect(unsafe_code, reason = "takes ownership of a descriptor from C")]
fn owned(fd: c_int) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::from_raw_os_error(-fd));
    }
    // SAFETY: libbpf has just opened this descriptor for us, and no other code uses it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

pub(crate) fn program_id(program: BorrowedFd<'_>) -> Option<u32> {
    // The descriptor's fdinfo has the program's id, without another unsafe call.
    holder::program_of(&std::fs::read_to_string(format!("/proc/self/fdinfo/{}", program.as_raw_fd())).ok()?)
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
