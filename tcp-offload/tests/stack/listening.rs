//! Listeners beside connections.

use std::time::Duration;

use xwarp_tcp::{mpa::MpaConfig, stack::ListenError, tcp::TcpConfig};

use crate::support::Lab;

/// MUST-41 and MUST-42: connections and listeners of a port do not touch each other.
#[test]
fn rfc9293_s3_9_1_1_a_port_can_be_listened_on_while_a_connection_of_it_opens() {
    let mut lab = Lab::new(TcpConfig::default(), 8);
    let conn = lab.connect();
    let client = &mut lab.client;
    let port = lab.port;
    let mut listen =
        || client.stack.listen(&mut client.link, None, port, 8, 1500, MpaConfig::default()).map(|_| ());
    assert_eq!(listen(), Ok(()), "in SYN-SENT");
    assert_eq!(listen(), Err(ListenError::AddressInUse));
    lab.pass(Duration::from_millis(5));
    assert_eq!((lab.client.upper.established.len(), lab.server.upper.established.len()), (1, 1));
    lab.client.send(conn, 5000);
    lab.pass(Duration::from_millis(5));
    assert_eq!(lab.server.upper.delivered, 5000);
    lab.assert_no_errors();
}
