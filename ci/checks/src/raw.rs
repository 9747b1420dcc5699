//! [`Raw`]: a connection to `xwarpd` for hostile programs.

use std::{
    env,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::atomic::{AtomicU32, Ordering},
};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with},
};
use xwarp_control::{Reason, Reply, Request, SOCKET_VARIABLE, Tagged, VERSION};
use xwarp_leg::message::{receive_message, send_message};

/// A connection to the helper that sends arbitrary messages.
pub(crate) struct Raw(OwnedFd);

/// The number of the next request: one that has its number is the same request.
static NEXT: AtomicU32 = AtomicU32::new(7);

impl Raw {
    pub(crate) fn socket(&self) -> &OwnedFd {
        &self.0
    }

    pub(crate) fn connect() -> Result<Self> {
        let path = env::var_os(SOCKET_VARIABLE).context("no helper is named")?;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        connect(&socket, &SocketAddrUnix::new(path.as_os_str())?)?;
        Ok(Self(socket))
    }

    pub(crate) fn greeted() -> Result<Self> {
        let raw = Self::connect()?;
        let reply = raw.ask(Request::Hello { version: VERSION }, None)?.0;
        ensure!(reply == Reply::Hello { version: VERSION }, "{reply:?}");
        Ok(raw)
    }

    pub(crate) fn send(&self, body: Request, descriptor: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        send_message(self.0.as_fd(), &Tagged { id, body }.encode(), descriptor.as_slice())
    }

    /// The next message; empty when the helper has hung up.
    pub(crate) fn receive(&self) -> Result<(Vec<u8>, Vec<OwnedFd>)> {
        let limit = Timespec { tv_sec: 10, tv_nsec: 0 };
        ensure!(poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&limit))? == 1, "no answer");
        match receive_message(self.0.as_fd()) {
            Err(Errno::CONNRESET) => Ok((Vec::new(), Vec::new())),
            other => Ok(other?),
        }
    }

    pub(crate) fn ask(
        &self,
        body: Request,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<(Reply, Vec<OwnedFd>)> {
        self.send(body, descriptor)?;
        let (bytes, descriptors) = self.receive()?;
        Ok((Tagged::<Reply>::decode(&bytes)?.body, descriptors))
    }

    pub(crate) fn refused(
        &self,
        body: Request,
        descriptor: Option<BorrowedFd<'_>>,
        reason: Reason,
    ) -> Result<()> {
        let request = format!("{body:?}");
        match self.ask(body, descriptor)?.0 {
            Reply::Refused(refusal) if refusal.reason == reason => {
                println!("{request}: {refusal}");
                Ok(())
            }
            other => bail!("{request}: {other:?}, expected a refusal for {reason:?}"),
        }
    }
}
