//! Transfers from and into registered memory.

use std::{
    io::{self, Write as _},
    ops::Range,
    sync::MutexGuard,
    time::{Duration, Instant},
};

use xwarp_verbs::{Access, Memory, MemoryRegion, RegionOptions};

use super::{SdpStream, broken, invalid, value};
use crate::{
    socket::{State, Until},
    wire::Advert,
};

/// Bytes per copy between a stream and memory.
const COPY_BYTES: usize = 16 << 10;
/// Receives with a shorter time limit are not advertised, so that programs with short limits do not exchange SinkAvail
/// and SinkAvailCancel continuously.
const BRIEF: Duration = Duration::from_millis(20);

impl SdpStream {
    /// Sends `range` of `memory` and returns when the peer has received it, so that the memory may change again. A
    /// range below the threshold is copied. A longer one is sent by RDMA Write if the peer has advertised memory for
    /// it. Otherwise it is advertised, and the peer fetches it by RDMA Read; if it does not within
    /// [`SdpOptions::unread_limit`](crate::SdpOptions::unread_limit), the range is sent in messages. There is no time
    /// limit: the connection's keepalive ends a send to a dead peer.
    pub fn send_memory(&self, memory: &Memory, range: Range<usize>) -> io::Result<()> {
        let sending = self.start_send_memory(memory, range)?;
        self.finish_send_memory(sending)
    }

    /// The first half of [`Self::send_memory`]: the range is a part of the stream, after all earlier data. The memory
    /// must stay unchanged until [`Self::finish_send_memory`] returns.
    pub fn start_send_memory(&self, memory: &Memory, range: Range<usize>) -> io::Result<Sending> {
        let len = range.len();
        let piece = memory.slice(range.start, len).map_err(invalid)?;
        if len < self.0.sdp.0.core.options.bcopy_threshold {
            self.send_copied(&piece)?;
            return Ok(Sending { id: None, len });
        }
        let socket = &self.0.socket;
        let mut state = socket.lock();
        if let Some(error) = broken(&state) {
            return Err(error);
        }
        let id = Some(advertise(&mut state, &piece, Purpose::Send)?);
        socket.drive(&mut state);
        Ok(Sending { id, len })
    }

    /// Waits until the peer has received the data, as [`Self::send_memory`] does.
    pub fn finish_send_memory(&self, sending: Sending) -> io::Result<()> {
        let Sending { id: Some(id), len } = sending else { return Ok(()) };
        let mut unread_at = Some(Instant::now() + self.0.sdp.0.core.options.unread_limit);
        let socket = &self.0.socket;
        let mut state = socket.lock();
        loop {
            if let Some(error) = state.error() {
                return Err(error);
            }
            if state.link.as_ref().is_none_or(|link| link.is_sent(id)) {
                self.count_sent(len);
                self.count("sdp_bytes_advertised", len);
                return Ok(());
            }
            let (after, in_time) = socket.wait(state, Until::Transferred, unread_at);
            state = after;
            if !in_time {
                unread_at = None;
                state.machine.cancel_writes();
                socket.drive(&mut state);
            }
        }
    }

    /// Whether [`Self::finish_send_memory`] would return at once, because the peer has received the data. False after a
    /// failure of the connection.
    pub fn is_sent(&self, sending: &Sending) -> bool {
        let state = self.0.socket.lock();
        state.error().is_none() && sending.is_done(&state)
    }

    fn send_copied(&self, piece: &Memory) -> io::Result<()> {
        let mut bytes = [0; COPY_BYTES];
        let mut at = 0;
        while at < piece.len() {
            let n = COPY_BYTES.min(piece.len() - at);
            let chunk = bytes.get_mut(..n).unwrap_or_default();
            piece.read(at, chunk).map_err(invalid)?;
            (&*self).write_all(chunk)?;
            at += n;
        }
        Ok(())
    }

    /// Receives into `range` of `memory`, at least one byte, or 0 at the end of the stream. Data that the peer
    /// advertises is placed there by RDMA Read. In Pipelined mode a range longer than SDP's receives is advertised, so
    /// that the peer places data there by RDMA Write. Data received in messages is copied.
    pub fn recv_memory(&self, memory: &Memory, range: Range<usize>) -> io::Result<usize> {
        self.receive_into(memory, range, &[], false).map(Received::bytes)
    }

    /// Does the same for a program that wants out-of-band bytes at their position in the stream.
    pub fn recv_memory_or_oob(&self, memory: &Memory, range: Range<usize>) -> io::Result<Received> {
        self.receive_into(memory, range, &[], true)
    }

    /// Sends `command` and receives the peer's next data into `range` of `reply`, like [`Self::recv_memory`]. When the
    /// peer sends long replies from memory, command and the advertisement of the reply's memory are one message (a
    /// Transaction). Not for non-blocking streams.
    pub fn transact(&self, command: &[u8], reply: &Memory, range: Range<usize>) -> io::Result<usize> {
        if self.is_nonblocking() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.receive_into(reply, range, command, false).map(Received::bytes)
    }

    /// With `oob`, an out-of-band byte is returned at its place.
    fn receive_into(
        &self,
        memory: &Memory,
        range: Range<usize>,
        command: &[u8],
        oob: bool,
    ) -> io::Result<Received> {
        let piece = memory.slice(range.start, range.len()).map_err(invalid)?;
        let end = value(&self.0.read_timeout).map(|limit| Instant::now() + limit);
        let socket = &self.0.socket;
        let mut state = socket.lock();
        // One receive into memory at a time.
        while state.receiving {
            if self.is_nonblocking() {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let (after, in_time) = socket.wait(state, Until::Changed, end);
            state = after;
            if !in_time {
                return Err(io::ErrorKind::WouldBlock.into());
            }
        }
        state.receiving = true;
        let (mut state, received) = self.receive_in_turn(state, &piece, command, oob, end);
        state.receiving = false;
        socket.drive(&mut state);
        received
    }

    fn receive_in_turn<'s>(
        &'s self,
        mut state: MutexGuard<'s, State>,
        piece: &Memory,
        mut command: &[u8],
        oob: bool,
        end: Option<Instant>,
    ) -> (MutexGuard<'s, State>, io::Result<Received>) {
        let socket = &self.0.socket;
        while !command.is_empty() {
            if let Some(error) = broken(&state) {
                return (state, Err(error));
            }
            let taken = state.machine.write(command);
            self.count_sent(taken);
            command = command.get(taken..).unwrap_or_default();
            if !command.is_empty() {
                socket.drive(&mut state);
                state = socket.wait(state, Until::Changed, None).0;
            }
        }
        let mut receive = Receive { id: None, withdrawn: self.is_nonblocking(), oob };
        loop {
            match self.receive_step(&mut state, piece, &mut receive, end) {
                Ok(Some(received)) => return (state, Ok(received)),
                Err(error) => return (state, Err(error)),
                Ok(None) => {}
            }
            if receive.id.is_some_and(|id| state.outcomes.received.contains_key(&id)) {
                continue;
            }
            let (after, in_time) = socket.wait(state, Until::Transferred, end.filter(|_| !receive.withdrawn));
            state = after;
            if !receive.withdrawn && (state.read_shut || !in_time) {
                receive.withdrawn = true;
                state.machine.cancel_reads();
                socket.drive(&mut state);
            }
        }
    }

    /// The result of a receive; `None` when it must wait.
    fn receive_step(
        &self,
        state: &mut State,
        piece: &Memory,
        receive: &mut Receive,
        end: Option<Instant>,
    ) -> io::Result<Option<Received>> {
        if let Some(id) = receive.id {
            let Some(n) = state.outcomes.received.remove(&id) else { return Ok(None) };
            receive.id = None;
            if n > 0 || state.machine.at_eof() {
                self.count_received(n as usize);
                return Ok(Some(Received::Bytes(n as usize)));
            }
            if let Some(error) = state.error() {
                return Err(error);
            }
            if receive.withdrawn && !state.read_shut {
                return Err(io::ErrorKind::WouldBlock.into());
            }
        }
        if receive.oob
            && state.machine.oob_is_next()
            && let Some(byte) = state.machine.take_oob()
        {
            return Ok(Some(Received::OutOfBand(byte)));
        }
        if state.machine.at_eof() || state.read_shut || piece.is_empty() {
            return Ok(Some(Received::Bytes(0)));
        }
        if state.machine.buffered() > 0 {
            // Data received in messages outlives the connection, and its memory needs no registration.
            let mut bytes = vec![0; state.machine.buffered().min(piece.len())];
            let n = state.machine.read(&mut bytes);
            piece.write(0, bytes.get(..n).unwrap_or_default()).map_err(invalid)?;
            self.count_received(n);
            return Ok(Some(Received::Bytes(n)));
        }
        if let Some(error) = state.error() {
            return Err(error);
        }
        let soon = end.is_some_and(|end| end < Instant::now() + BRIEF);
        let purpose = if receive.withdrawn || soon { Purpose::ReceiveBriefly } else { Purpose::Receive };
        receive.id = Some(advertise(state, piece, purpose)?);
        if receive.withdrawn {
            state.machine.cancel_reads();
        }
        self.0.socket.drive(state);
        Ok(None)
    }
}

/// Memory that is being sent, for [`SdpStream::finish_send_memory`].
#[derive(Debug)]
#[must_use]
pub struct Sending {
    /// `None`: it was copied.
    id: Option<u64>,
    len: usize,
}

impl Sending {
    /// Whether the memory is free again.
    pub(crate) fn is_done(&self, state: &State) -> bool {
        self.id.zip(state.link.as_ref()).is_none_or(|(id, link)| link.is_sent(id))
    }
}

/// What [`SdpStream::recv_memory_or_oob`] returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Received {
    /// That many bytes were received; 0 is the end of the stream.
    Bytes(usize),
    /// The next byte of the stream is out of band.
    OutOfBand(u8),
}

impl Received {
    /// The number of bytes, for a receive that does not ask for out-of-band bytes.
    fn bytes(self) -> usize {
        if let Self::Bytes(len) = self { len } else { 0 }
    }
}

/// A receive into memory that waits.
struct Receive {
    /// Its number, once its memory is with the machine.
    id: Option<u64>,
    /// Its time limit has passed, or it does not wait at all.
    withdrawn: bool,
    oob: bool,
}

/// The purpose of a registration.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Purpose {
    Send,
    Receive,
    ReceiveBriefly,
}

/// Registers `piece` for this connection's peer and gives it to the machine; returns its identifier.
fn advertise(state: &mut State, piece: &Memory, purpose: Purpose) -> io::Result<u64> {
    let State { machine, link, .. } = state;
    if machine.asks_to_suspend() {
        return Err(io::ErrorKind::ResourceBusy.into());
    }
    let len = u32::try_from(piece.len()).map_err(invalid)?;
    let link = link.as_mut().ok_or(io::ErrorKind::NotConnected)?;
    let options = RegionOptions { base: 0, only_for: Some(link.qp.id()) };
    let access = match purpose {
        Purpose::Send => Access::REMOTE_READ,
        Purpose::Receive | Purpose::ReceiveBriefly => Access::LOCAL_WRITE | Access::REMOTE_WRITE,
    };
    let region: MemoryRegion =
        link.pd.register_with(piece.clone(), access, options).map_err(io::Error::other)?;
    let advert = Advert { len, stag: region.key().value(), offset: 0 };
    let (id, regions) = match purpose {
        Purpose::Send => (machine.write_memory(advert), &mut link.sends),
        Purpose::Receive => (machine.read_memory(advert), &mut link.wants),
        Purpose::ReceiveBriefly => (machine.read_memory_briefly(advert), &mut link.wants),
    };
    regions.insert(id, region);
    Ok(id)
}
