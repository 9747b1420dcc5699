//! The buffer sizes of the loopback towards the network. While a program writes long pieces, the buffers are small:
//! full as soon as the peer takes no more, and empty before the program is woken. Otherwise the next long write would
//! not find them empty.

use std::{
    os::fd::{AsFd as _, OwnedFd, RawFd},
    sync::atomic::{AtomicBool, Ordering},
};

use rustix::net::sockopt;

use crate::sys;

/// Sizes of the small buffers.
const SHORT_SEND_BYTES: usize = 4 << 10;
const SHORT_RECEIVE_BYTES: usize = 32 << 10;

/// Whether the buffers of a connection's loopback are small.
#[derive(Debug, Default)]
pub struct Loopback {
    /// Whether those of the leg are small, or will be.
    short: AtomicBool,
    /// Whether those of the program's socket are small.
    own_short: AtomicBool,
}

impl Loopback {
    pub fn is_short(&self) -> bool {
        self.short.load(Ordering::Relaxed)
    }

    /// Makes the buffers small, or lets the kernel choose their sizes again, at the relay's end.
    pub fn shorten(&self, leg: &OwnedFd, short: bool) {
        if self.short.swap(short, Ordering::Relaxed) != short {
            if short {
                let _ = sockopt::set_socket_recv_buffer_size(leg, SHORT_RECEIVE_BYTES);
            } else {
                sys::grow_buffers(leg.as_fd());
            }
        }
    }

    /// Does the same at the program's end, before a call writes there.
    pub fn shorten_own(&self, fd: RawFd) {
        let short = self.is_short();
        if self.own_short.load(Ordering::Relaxed) != short
            && self.own_short.swap(short, Ordering::Relaxed) != short
            && let Some(socket) = sys::borrow(fd)
        {
            if short {
                let _ = sockopt::set_socket_send_buffer_size(socket, SHORT_SEND_BYTES);
            } else {
                sys::grow_buffers(socket);
            }
        }
    }
}
