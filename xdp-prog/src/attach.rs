//! Attaching a program by a `bpf_link`, which the kernel removes when its owner exits, noticing that somebody has detached it, and
//! replacing another owner's program.

use std::ffi::c_int;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::sync::{Mutex, MutexGuard, PoisonError};

use libbpf_rs::libbpf_sys;
use libbpf_rs::query::{LinkInfo, LinkInfoIter, LinkTypeInfo, ProgInfoIter};
use libbpf_rs::{Program, Xdp, XdpFlags};

use crate::holder::{self, Holder};

/// Name of the steering program in the kernel.
pub const PROGRAM_NAME: &str = "xwarp_steer";

/// Name of the switch's program on the interface, in the kernel.
pub const SWITCH_NAME: &str = "xwarp_uplink";

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
    /// The word of `ip link` for this way of attaching it.
    pub keyword: &'static str,
    /// The id of the link (`bpf_link`) that attaches it; `None` without one, or if it is not visible (without `CAP_SYS_ADMIN`).
    pub link: Option<u32>,
    /// A process that holds it or its link; `None` if it is pinned, attached without a link, or not visible.
    pub holder: Option<Holder>,
}

impl Attached {
    /// The command that detaches it from `interface`. `ip link` cannot detach what a link attaches, and detaches nothing, without an
    /// error, if its word is that of another mode.
    pub fn detach_command(&self, interface: &str) -> String {
        match self.link {
            Some(link) => format!("bpftool link detach id {link}"),
            None => format!("ip link set dev {interface} {} off", self.keyword),
        }
    }
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
        (found.drv_prog_id, AttachMode::Native, "xdpdrv"),
        (found.hw_prog_id, AttachMode::Native, "xdpoffload"),
        (found.skb_prog_id, AttachMode::Generic, "xdpgeneric"),
    ];
    let there = candidates.into_iter().find(|(id, ..)| *id != 0);
    Ok(there.map(|(id, mode, keyword)| {
        let (name, holder) = (program_name(id), holder::of_program(id));
        Attached { id, name, mode, keyword, link: link_of(id, ifindex), holder }
    }))
}

/// The id of the link that attaches program `id` to interface `ifindex`. Interface indices repeat across network namespaces, program
/// ids do not.
fn link_of(id: u32, ifindex: u32) -> Option<u32> {
    let is_it = |link: &LinkInfo| {
        link.prog_id == id && matches!(&link.info, LinkTypeInfo::Xdp(xdp) if xdp.ifindex == ifindex)
    };
    LinkInfoIter::default().find(is_it).map(|link| link.id)
}

/// The program that is attached to interface `ifindex` of the calling thread's network namespace. Needs no privileges,
/// but without them the program's name and holder are unknown.
pub fn attached_to(ifindex: u32) -> io::Result<Option<Attached>> {
    attached(File::open("/dev/null")?.as_fd(), ifindex)
}

/// Where a program is attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub ifindex: u32,
    pub hook: Hook,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hook {
    Xdp(AttachMode),
    /// The ingress of tc, behind the programs that are attached already.
    Ingress,
}

/// Whether a program was still attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kept {
    /// It was.
    Attached,
    /// Somebody had detached it; it is attached again.
    Again,
}

/// A program's attachment to an interface.
#[derive(Debug)]
struct Attachment {
    link: OwnedFd,
    /// The process that attached the program; a child (`fork`) has a copy of the descriptor.
    owner: u32,
    /// The network namespace of the interface.
    namespace: Option<u64>,
    place: Place,
}

/// What keeps a program attached, shared by threads. Dropping it detaches the program.
#[derive(Debug, Default)]
pub(crate) struct Anchor(Mutex<Option<Attachment>>);

impl Anchor {
    fn lock(&self) -> MutexGuard<'_, Option<Attachment>> {
        // The value is replaced as a whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Attaches `program` at `place`, unless it is there already.
    ///
    /// # Errors
    /// As [`Self::keep`].
    pub(crate) fn attach(&self, program: BorrowedFd<'_>, place: Place) -> Result<(), AttachError> {
        if self.is_at(place) {
            return Ok(());
        }
        self.detach();
        *self.lock() = Some(Attachment::new(program, place)?);
        Ok(())
    }

    /// Takes over a link that another process has made, and lets it run `program`. No frame passes without either program.
    ///
    /// # Errors
    /// The link has no interface any more, or the kernel refuses the program.
    pub(crate) fn take_over(
        &self,
        link: OwnedFd,
        program: BorrowedFd<'_>,
        place: Place,
    ) -> Result<(), AttachError> {
        let attachment = Attachment { link, owner: std::process::id(), namespace: namespace(), place };
        update(attachment.link.as_fd(), program)?;
        *self.lock() = Some(attachment);
        Ok(())
    }

    pub(crate) fn is_at(&self, place: Place) -> bool {
        self.lock().as_ref().is_some_and(|there| there.place == place)
    }

    /// Attaches `program` again if somebody else has detached it.
    ///
    /// # Errors
    /// [`AttachError::Foreign`] names a program that has taken its place. The interface is gone, or in another network namespace
    /// than the calling thread.
    pub(crate) fn keep(&self, program: BorrowedFd<'_>) -> Result<Kept, AttachError> {
        let mut attachment = self.lock();
        match &mut *attachment {
            Some(there) if there.owner == std::process::id() && !there.is_live() => {
                if there.namespace != namespace() {
                    let text = "the calling thread is in another network namespace";
                    return Err(io::Error::other(text).into());
                }
                *there = Attachment::new(program, there.place)?;
                Ok(Kept::Again)
            }
            _ => Ok(Kept::Attached),
        }
    }

    /// Has the driver give its program to all queues that the interface has now. The driver of veth gives it to none that is added
    /// while the program is attached: their frames pass it by. The kernel does nothing when a link gets the program that it has, so
    /// the link has another one for a moment, which drops all frames.
    ///
    /// # Errors
    /// The kernel refuses the other program; then nothing has changed.
    pub(crate) fn cover_queues(&self, program: BorrowedFd<'_>) -> io::Result<()> {
        let attachment = self.lock();
        match &*attachment {
            Some(Attachment { link, place: Place { hook: Hook::Xdp(AttachMode::Native), .. }, .. }) => {
                let pause = drop_all()?;
                update(link.as_fd(), pause.as_fd())?;
                update(link.as_fd(), program).or_else(|_| update(link.as_fd(), program))
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn detach(&self) {
        if let Some(Attachment { link, owner, .. }) = self.lock().take()
            && owner == std::process::id()
        {
            // Closing the descriptor is not enough while the process forks: the child holds a copy for a
            // moment. If the detach fails, closing remains.
            let _ = detach(link.as_fd());
        }
    }

    /// Calls `f` with the descriptor that keeps the program attached.
    pub(crate) fn with_link<R>(&self, f: impl FnOnce(Option<BorrowedFd<'_>>) -> R) -> R {
        f(self.lock().as_ref().map(|attachment| attachment.link.as_fd()))
    }
}

impl Drop for Anchor {
    fn drop(&mut self) {
        self.detach();
    }
}

impl Attachment {
    fn new(program: BorrowedFd<'_>, place: Place) -> Result<Self, AttachError> {
        let link = match place.hook {
            Hook::Xdp(mode) => attach(program, place.ifindex, mode)?,
            Hook::Ingress => create_link(program, place.ifindex, libbpf_sys::BPF_TCX_INGRESS, 0)?,
        };
        Ok(Self { link, owner: std::process::id(), namespace: namespace(), place })
    }

    /// Whether the link still has its interface, which the kernel takes from a link that is detached. No event announces that.
    fn is_live(&self) -> bool {
        interface_of(self.link.as_fd()).is_none_or(|index| index != 0)
    }
}

/// Index of the interface that a link is attached to; 0 after it was detached, or its interface removed. `None` if the kernel does
/// not report it.
pub fn interface_of(link: BorrowedFd<'_>) -> Option<u32> {
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", link.as_raw_fd())).ok()?;
    info.lines().find_map(|line| line.strip_prefix("ifindex:"))?.trim().parse().ok()
}

/// The network namespace of the calling thread, by its inode.
fn namespace() -> Option<u64> {
    Some(std::fs::metadata("/proc/thread-self/ns/net").ok()?.ino())
}

pub(crate) fn attach(
    program: BorrowedFd<'_>,
    ifindex: u32,
    mode: AttachMode,
) -> Result<OwnedFd, AttachError> {
    if let Some(there) = attached(program, ifindex)? {
        return Err(AttachError::Foreign(there));
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

/// Another owner's program that was detached, until it is put back or given up.
#[derive(Debug)]
pub(crate) struct Replaced {
    program: OwnedFd,
    ifindex: c_int,
    mode: AttachMode,
}

impl Replaced {
    /// Detaches the program that is attached to interface `ifindex`, if there is one: by its link if it has one, because the kernel
    /// then rejects other ways.
    ///
    /// # Errors
    /// [`AttachError::Foreign`] when it must stay: a living process of ours serves connections by it, or it could not be put
    /// back.
    pub(crate) fn detach(any: BorrowedFd<'_>, ifindex: u32) -> Result<Option<Self>, AttachError> {
        let Some(there) = attached(any, ifindex)? else { return Ok(None) };
        // The link of a process that has ended is gone.
        let is_ours = [PROGRAM_NAME, SWITCH_NAME].contains(&there.name.as_str());
        let Ok(program) = Program::fd_from_id(there.id) else { return Err(AttachError::Foreign(there)) };
        if is_ours && there.link.is_some() {
            return Err(AttachError::Foreign(there));
        }
        let index = c_int::try_from(ifindex).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        let replaced = Self { program, ifindex: index, mode: there.mode };
        match there.link {
            Some(link) => detach_link(link)?,
            None => Xdp::new(any).detach(index, replaced.flags()).map_err(|error| system(&error))?,
        }
        Ok(Some(replaced))
    }

    fn flags(&self) -> XdpFlags {
        match self.mode {
            AttachMode::Native => XdpFlags::DRV_MODE,
            AttachMode::Generic => XdpFlags::SKB_MODE,
        }
    }

    /// Attaches it again. A link of its owner's cannot be restored: the program is then attached without one.
    pub(crate) fn put_back(self) {
        if let Err(error) = Xdp::new(self.program.as_fd()).attach(self.ifindex, self.flags()) {
            tracing::error!(%error, ifindex = self.ifindex, "the XDP program that was replaced cannot be put back");
        }
    }
}

#[expect(unsafe_code, reason = "libbpf-rs looks up no links by id")]
fn detach_link(id: u32) -> io::Result<()> {
    // SAFETY: takes and returns plain numbers.
    let link = owned(unsafe { libbpf_sys::bpf_link_get_fd_by_id(id) })?;
    detach(link.as_fd())
}

/// A program that drops all frames.
#[expect(unsafe_code, reason = "libbpf-rs loads programs of object files only")]
fn drop_all() -> io::Result<OwnedFd> {
    const XDP_DROP: i32 = 1;
    const MOVE_IMMEDIATE: u8 = 0xb7;
    const EXIT: u8 = 0x95;
    let result = libbpf_sys::bpf_insn { code: MOVE_IMMEDIATE, imm: XDP_DROP, ..Default::default() };
    let code = [result, libbpf_sys::bpf_insn { code: EXIT, ..Default::default() }];
    let load = |prog_flags| {
        let mut options = libbpf_sys::bpf_prog_load_opts {
            sz: size_of::<libbpf_sys::bpf_prog_load_opts>() as _,
            expected_attach_type: libbpf_sys::BPF_XDP,
            prog_flags,
            ..Default::default()
        };
        // SAFETY: name and licence end with a zero; the code and the options live for the whole call.
        owned(unsafe {
            libbpf_sys::bpf_prog_load(
                libbpf_sys::BPF_PROG_TYPE_XDP,
                c"xwarp_pause".as_ptr(),
                c"Dual MIT/GPL".as_ptr(),
                code.as_ptr(),
                code.len() as _,
                &raw mut options,
            )
        })
    };
    // Kernels before 5.18 know no frames of several buffers.
    load(crate::HAS_FRAGS).or_else(|_| load(0))
}

/// Replaces the program of a link.
#[expect(unsafe_code, reason = "libbpf-rs updates only links that it made")]
pub(crate) fn update(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: both descriptors are open for the whole call, which needs no options.
    match unsafe { libbpf_sys::bpf_link_update(link.as_raw_fd(), program.as_raw_fd(), std::ptr::null()) } {
        0.. => Ok(()),
        error => Err(io::Error::from_raw_os_error(-error)),
    }
}

/// Detaches a link's program at once, even if other processes hold the link.
#[expect(unsafe_code, reason = "libbpf-rs detaches only links that it made")]
pub fn detach(link: BorrowedFd<'_>) -> io::Result<()> {
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
