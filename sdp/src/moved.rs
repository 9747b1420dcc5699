//! Connections that move to another service, of this process or of another one (draft section 13).

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use xwarp_verbs::cm::IncomingRequest;

use crate::{
    listener::{Backlog, SdpListener},
    machine::{Machine, Reader, Violation, Writer},
    service::{Core, Sdp, lock},
    stream::SdpStream,
};

/// Time limit for the peer to connect again.
const RECONNECT_LIMIT: Duration = Duration::from_secs(30);
/// Requests that wait for the state of the suspended connection. The peer may connect before the state has arrived, and so may others.
const MAX_REQUESTS: usize = 8;

/// The place where a suspended connection continues: a port of a service, which its peer will connect to.
///
/// The port goes to the process that has the connection, which passes it to [`SdpStream::suspend`] and returns the state. Both
/// processes need a device with the same address: an interface that `xwarpd` shares.
#[derive(Debug)]
pub struct Successor(SdpListener);

/// The two parts from which a connection is made again, in whichever order they come.
#[derive(Default)]
pub(crate) struct Resumption {
    suspended: Option<Suspended>,
    requests: Vec<IncomingRequest>,
}

struct Suspended {
    machine: Machine,
    local: SocketAddr,
    peer: SocketAddr,
}

/// The state of a suspended connection as bytes. `None` if the machine has memory of the program.
pub(crate) fn save(machine: &Machine, (local, peer): (SocketAddr, SocketAddr)) -> Option<Vec<u8>> {
    let mut out = Writer::default();
    machine.save(&mut out)?;
    for address in [local, peer] {
        out.bytes(address.to_string().bytes());
    }
    Some(out.0)
}

impl Suspended {
    /// What [`save`] has written.
    fn restore(state: &[u8]) -> Option<Self> {
        let mut saved = Reader(state);
        let machine = Machine::restore(&mut saved)?;
        let mut address = || std::str::from_utf8(saved.bytes()?).ok()?.parse().ok();
        let (local, peer) = (address()?, address()?);
        saved.0.is_empty().then_some(Self { machine, local, peer })
    }
}

impl Successor {
    /// Takes a free port of `address`, that of the connection.
    pub fn bind(sdp: &Sdp, address: IpAddr) -> io::Result<Self> {
        let resumes = Some(Mutex::new(Resumption::default()));
        SdpListener::bind_for(sdp, SocketAddr::new(address, 0), resumes).map(Self)
    }

    /// The port for [`SdpStream::suspend`].
    pub fn port(&self) -> io::Result<u16> {
        self.0.local_addr().map(|address| address.port())
    }

    /// Continues the connection with the `state` that [`SdpStream::suspend`] has returned, when the peer has connected again: from the
    /// same address and port as before. Fails with [`io::ErrorKind::InvalidData`] if the state is of another version, and with
    /// [`io::ErrorKind::TimedOut`] if the peer does not connect within 30 s.
    pub fn resume(self, state: &[u8]) -> io::Result<SdpStream> {
        let suspended = Suspended::restore(state).ok_or(io::ErrorKind::InvalidData)?;
        let Self(listener) = &self;
        if let Some(resumption) = &listener.backlog.resumes {
            lock(resumption).suspended = Some(suspended);
            listener.sdp.0.core.resume(&listener.backlog, resumption)?;
        }
        listener.accept_until(Some(Instant::now() + RECONNECT_LIMIT)).map(|(stream, _)| stream)
    }
}

impl Core {
    /// A request to a [`Successor`].
    pub(crate) fn requested_again(
        self: &Arc<Self>,
        request: IncomingRequest,
        backlog: &Arc<Backlog>,
        resumption: &Mutex<Resumption>,
    ) -> io::Result<()> {
        let mut waiting = lock(resumption);
        if waiting.requests.len() >= MAX_REQUESTS {
            return request.id.reject(&[]).map_err(io::Error::other);
        }
        waiting.requests.push(request);
        drop(waiting);
        self.resume(backlog, resumption)
    }

    /// Makes the suspended connection again, if its peer has asked for it.
    fn resume(self: &Arc<Self>, backlog: &Arc<Backlog>, resumption: &Mutex<Resumption>) -> io::Result<()> {
        let mut waiting = lock(resumption);
        let Resumption { suspended: place, requests } = &mut *waiting;
        let Some(suspended) = place else { return Ok(()) };
        for request in std::mem::take(requests) {
            let mut machine = suspended.machine.clone();
            let (shown, resumed) = if request.peer == suspended.peer {
                ((suspended.local, suspended.peer), machine.resume(&request.private_data))
            } else {
                ((request.local, request.peer), Err(Violation::Suspend))
            };
            let is_peer = resumed.is_ok();
            self.establish(request.id, resumed.map(|()| machine), shown, backlog)?;
            if is_peer {
                *place = None;
                break;
            }
        }
        Ok(())
    }
}
