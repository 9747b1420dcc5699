//! Messages of the control protocol, with the descriptors that they carry, over a `SOCK_SEQPACKET` socket.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg, sockopt,
};
use xwarp_control::MAX_BYTES;

/// Largest number of descriptors in a message that is sent.
const MAX_DESCRIPTORS: usize = 2;
/// Largest number of descriptors in any message (`SCM_MAX_FD`). All are received: the kernel would close the others,
/// which may take arbitrarily long.
const MAX_RECEIVED: usize = 253;

/// Sends one message with descriptors, at most two, without waiting.
///
/// # Errors
/// `EAGAIN` when the receiver does not read.
pub fn send_message(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Errno::INVAL);
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags).map(drop)
}

/// Whether a message waits in a socket, also an empty one, which [`receive_message`] does not tell from the end of the connection. False
/// for other files. From now on, messages of this socket come with credentials.
pub fn has_message(socket: BorrowedFd<'_>) -> bool {
    if sockopt::set_socket_passcred(socket, true).is_err() {
        return false;
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmCredentials(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
    let found = recvmsg(socket, &mut [IoSliceMut::new(&mut [0])], &mut control, flags);
    // Descriptors find no room.
    found.is_ok_and(|found| {
        found.bytes > 0 || found.flags.contains(ReturnFlags::CTRUNC) || control.drain().next().is_some()
    })
}

/// Receives one message with its descriptors, without waiting. An empty message means that the sender has closed
/// its end; a message that is too long is cut to one byte more than [`MAX_BYTES`], which no decoder accepts.
///
/// # Errors
/// `EAGAIN` when there is none.
pub fn receive_message(socket: BorrowedFd<'_>) -> Result<(Vec<u8>, Vec<OwnedFd>), Errno> {
    let mut bytes = vec![0; MAX_BYTES + 1];
    // Credentials come with the messages of a socket that was asked whether it has some.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_RECEIVED), ScmCredentials(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags)?;
    bytes.truncate(received.bytes);
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    Ok((bytes, descriptors))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, shutdown, socketpair};

    use super::*;

    #[test]
    fn attack_an_empty_message_is_not_the_end_of_a_connection() {
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        assert!(!has_message(ours.as_fd()));
        let descriptor = std::fs::File::open("/dev/null").unwrap();
        send_message(theirs.as_fd(), b"", &[]).unwrap();
        send_message(theirs.as_fd(), b"", &[descriptor.as_fd()]).unwrap();
        send_message(theirs.as_fd(), b"text", &[]).unwrap();
        shutdown(&ours, Shutdown::Both).unwrap();
        drop(theirs);
        let mut received = Vec::new();
        while has_message(ours.as_fd()) {
            let (bytes, descriptors) = receive_message(ours.as_fd()).unwrap();
            received.push((bytes.len(), descriptors.len()));
        }
        assert_eq!(received, [(0, 0), (0, 1), (4, 0)]);
        assert!(!has_message(descriptor.as_fd()));
    }
}
