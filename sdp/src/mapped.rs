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
    /// most `sends` messages are sent to its host's port mapper: the first waits 50 ms for its answer, each further
    /// one twice as long. If the connection fails at a remembered address, the port mapper is asked again.
    ///
    /// [`io::ErrorKind::ConnectionRefused`] means that the caller should use TCP: its host has no port mapper, which is
    /// remembered for 1 s if the host says so, and for 2 s (longer each time, up to 60 s) if it is silent, or the service does not speak
    /// SDP (1 s).
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
        let mut known = cache().look(Instant::now(), target);
        loop {
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
            match Self::connect_from(sdp, id, address, Some(end)) {
                Ok(connected) => return Ok(connected),
                // The server was restarted since, and listens for SDP at another port.
                Err(error)
                    if error.kind() == io::ErrorKind::ConnectionRefused
                        && known.take().is_some()
                        && Instant::now() < end =>
                {
                    cache().forget(target);
                }
                Err(error) => {
                    cache().deny(Instant::now(), target);
                    return Err(error);
                }
            }
        }
    }
}
