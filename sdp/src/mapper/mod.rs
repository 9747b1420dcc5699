//! The port mapper (draft section 7): a connecting end asks the host of a service at UDP port 3935 where the service listens
//! for SDP.
//!
//! | file | owns |
//! |---|---|
//! | `packet` | the 48 bytes of a message |
//! | `server` | the addresses of services, and rate limits of answers |
//! | `host` | the process of a host that answers, and the registrations of the others |
//! | `listening` | the kernel's listening sockets |
//! | `kept` | descriptors that forked children must not keep |
//! | `client` | the exchange of one question, and the cache of answers |
//!
//! The server keeps no state for a question: a service has its port as long as its listener exists, so a repeated
//! question has the same answer, and an acknowledgement changes nothing.

mod client;
mod host;
mod kept;
mod listening;
mod packet;
mod server;

pub use self::{
    client::{Answer, Asked, Cache, Question, source_of},
    host::Host,
    kept::descriptors,
    listening::is_listening,
    packet::{Kind, PACKET_BYTES, PORT, Packet, PacketError, PmTime},
};
