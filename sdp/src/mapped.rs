//! Connections to services by their conventional addresses, which the port mapper of their host translates.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::PoisonError,
    time::{Duration, Instant},
};

use crate::{
    mapper::{Answer, Question, source_of},
    service::Sdp,
    stream::SdpStream,
};

impl SdpStream {
    /// Connects over SDP to the service whose TCP address is `target`, if it listens over SDP, at most for `limit`. At
    /// most `sends` messages are sent to its host's port mapper: the first waits 200 ms for its answer, each further
    /// one twice as long.
    ///
    /// [`io::ErrorKind::ConnectionRefused`] means that the caller should use TCP: its host has no port mapper, which is
    /// remembered for 60 s, or the service does not speak SDP.
    pub fn connect_service(sdp: &Sdp, target: SocketAddr, limit: Duration, sends: u32) -> io::Result<Self> {
        Self::connect_service_from(sdp, source_of(target)?, target, limit, sends)
    }

    /// The same from the address `source` of this host.
    pub fn connect_service_from(
        sdp: &Sdp,
        source: IpAddr,
        target: SocketAddr,
        limit: Duration,
        sends: u32,
    ) -> io::Result<Self> {
        let core = &sdp.0.core;
        let end = Instant::now() + limit;
        let cache = || core.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        let known = cache().look(Instant::now(), target);
        // The request to the port mapper contains the source port of the connection.
        let from = SocketAddr::new(source, 0);
        let id = core.identifier(Some(from))?;
        let answer = if let Some(answer) = known {
            answer
        } else {
            let from = id.local_address().unwrap_or(from);
            let asked = Question::new(from, target).ask(sends)?;
            tracing::debug!(%target, ?asked, "the port mapper was asked");
            cache().learn(Instant::now(), target, asked)
        };
        let Answer::At(address) = answer else {
            let text = format!("{target} does not listen over SDP");
            return Err(io::Error::new(io::ErrorKind::ConnectionRefused, text));
        };
        let connected = Self::connect_from(sdp, id, address, Some(end));
        if connected.is_err() {
            cache().deny(Instant::now(), target);
        }
        connected
    }
}
