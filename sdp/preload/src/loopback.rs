//! The length of the loopback towards the network. While a program writes long pieces, it is short: full as soon as the peer takes no
//! more, and empty before the program is woken. Otherwise the next long write would not find it empty.

use std::{
    os::fd::{AsFd as _, OwnedFd, RawFd},
    sync::atomic::{AtomicBool, Ordering},
};

use rustix::net::sockopt;

use crate::sys;

/// Buffers of a short loopback.
const SHORT_SEND_BYTES: usize = 4 << 10;
const SHORT_RECEIVE_BYTES: usize = 32 << 10;

/// Whether the buffers of a connection's loopback are short.
#[derive(Debug, Default)]
pub struct Loopback {
    /// Those of the leg, or soon.
    short: AtomicBool,
    /// Those of the program's socket.
    own_short: AtomicBool,
}

impl Loopback {
    pub fn is_short(&self) -> bool {
        self.short.load(Ordering::Relaxed)
    }

    /// Makes it short or gives it back to the kernel, at the relay's end.
    pub fn shorten(&self, leg: &OwnedFd, short: bool) {
        if self.short.swap(short, Ordering::Relaxed) != short {
            if short {
                let _ = sockopt::set_socket_recv_buffer_size(leg, SHORT_RECEIVE_BYTES);
            } else {
                sys::grow_buffers(leg.as_fd());
            }
        }
    }

    /// The same at the program's end, before a call writes there.
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
