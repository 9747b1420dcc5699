//! Why a connection has ended.

use std::time::{Duration, Instant};

use xwarp_verbs::{
    CloseReason,
    cm::{Connection, EventKind},
};

/// Time to wait for a connection's close reason after its requests were flushed.
const REASON_LIMIT: Duration = Duration::from_millis(100);

/// The close reason of a connection whose requests were flushed; `None` when it is not known in time.
pub fn close_reason(connection: &Connection) -> Option<CloseReason> {
    let until = Instant::now() + REASON_LIMIT;
    loop {
        while let Some(event) = connection.poll() {
            if let EventKind::Closed(reason) = event {
                return Some(reason);
            }
        }
        if Instant::now() >= until {
            return None;
        }
        connection.id().device().progress();
    }
}
