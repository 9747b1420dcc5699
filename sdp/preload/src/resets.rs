//! The reset of a program's connection on the loopback.

use std::{
    os::fd::{AsRawFd as _, OwnedFd},
    thread,
    time::{Duration, Instant},
};

use rustix::{
    io::{Errno, ioctl_fionread},
    net::{RecvFlags, connect_unspec, recv},
};

use crate::sys;

/// Interval at which a leg that is to be reset is checked for data that the program's socket has not received, at first and at most.
const TAKEN_LOOK: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(100)];

/// Resets the program's connection.
pub fn reset(leg: &OwnedFd) {
    // The kernel sends a reset when a connected socket is dissolved, but refuses this briefly while another thread
    // waits in a call on the socket.
    for _ in 0..100 {
        if connect_unspec(leg) != Err(Errno::BUSY) {
            return;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until the program's socket has received what was written to the leg: a reset of the leg discards the rest, but as with
/// TCP, the program must be able to read what came before the peer's reset. Ends early if the program closes its socket, sends
/// something, which the reset must answer, or reads nothing for `patience`.
pub fn wait_until_taken(leg: &OwnedFd, patience: Option<Duration>) {
    // What the program has sent before is lost.
    let mut lost = ioctl_fionread(leg).unwrap_or(0);
    let mut discarded = [0; 4 << 10];
    let mut look = TAKEN_LOOK[0];
    let (mut before, mut since) = (0, Instant::now());
    while let Some(left @ 1..) = sys::unacknowledged(leg.as_raw_fd()) {
        match recv(leg, &mut discarded, RecvFlags::DONTWAIT).map(|(len, _)| len as u64) {
            Ok(len @ 1..) if len <= lost => {
                lost -= len;
                continue;
            }
            Ok(0) | Err(Errno::AGAIN | Errno::INTR) => {}
            Ok(_) | Err(_) => return,
        }
        if left != before {
            (before, since) = (left, Instant::now());
        } else if patience.is_some_and(|patience| since.elapsed() >= patience) {
            return;
        }
        thread::sleep(look);
        look = (look * 2).min(TAKEN_LOOK[1]);
    }
}
