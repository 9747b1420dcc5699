//! The drop-in libraries' initiator and a peer that knows revision 1 of MPA only. The peer is the kernel's TCP, and closes a connection
//! whose MPA Request has another revision (RFC 6581 section 10).
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::{
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    thread,
};

use xwarp_checks::{
    lab::{Family, Lab, LabOptions, Side},
    unmodified::{LIMIT, compiled, start_with},
};

/// Port of the programs in `tests/compat`.
const PORT: u16 = 7250;
/// Octets of an MPA Request and Reply without private data (RFC 5044 section 7.1).
const FRAME: usize = 20;
/// Private data of the Reply: `struct place` of `tests/compat/ends.h`.
const PLACE: usize = 12;
const CRC: u8 = 0x40;
/// The bit for peer-to-peer mode, in the first octet behind the frame (RFC 6581 section 9).
const PEER_TO_PEER: u8 = 0x80;

/// An MPA Request that the peer got.
#[derive(Debug, PartialEq, Eq)]
struct Request {
    revision: u8,
    peer_to_peer: bool,
}

const ONE: Request = Request { revision: 1, peer_to_peer: false };

/// Reads requests until one has revision 1, which is accepted. Returns all requests, and the connection.
fn responder(listener: &TcpListener) -> (Vec<Request>, TcpStream) {
    let mut requests = Vec::new();
    loop {
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let mut frame = [0; FRAME];
        stream.read_exact(&mut frame).unwrap();
        assert_eq!(&frame[..16], b"MPA ID Req Frame");
        let mut data = vec![0; usize::from(u16::from_be_bytes([frame[18], frame[19]]))];
        stream.read_exact(&mut data).unwrap();
        let revision = frame[17];
        requests.push(Request { revision, peer_to_peer: revision == 2 && data[0] & PEER_TO_PEER != 0 });
        if revision == 1 {
            let mut reply = b"MPA ID Rep Frame".to_vec();
            reply.extend([CRC, 1, 0, PLACE as u8]);
            reply.extend([0; PLACE]);
            stream.write_all(&reply).unwrap();
            return (requests, stream);
        }
    }
}

/// The requests of a C program with these environment variables, which connects.
fn requests(variables: &[(&str, &str)]) -> Vec<Request> {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let program = compiled(&lab, "manager", &["-libverbs", "-lrdmacm", "-lpthread"]).unwrap();
    let address = lab.address(Side::B, Family::V4);
    let listener = lab.within(Side::B, || TcpListener::bind((address, PORT))).unwrap().unwrap();
    let responder = thread::spawn(move || responder(&listener));
    let mut client = start_with(&lab, Side::A, variables, &format!("{program} stay {address}")).unwrap();
    client.wait_for("connected", LIMIT).unwrap();
    responder.join().unwrap().0
}

/// Without this, a program could not connect to such a peer at all: C programs always ask for peer-to-peer mode first.
#[test]
fn netns_compat_revision_1_is_used_with_a_peer_that_knows_no_other() {
    assert_eq!(requests(&[]), [Request { revision: 2, peer_to_peer: true }, ONE]);
}

#[test]
fn netns_compat_revision_and_mode_are_chosen_by_variables() {
    assert_eq!(requests(&[("XWARP_MPA_REVISION", "1")]), [ONE]);
    let without_mode = Request { revision: 2, peer_to_peer: false };
    assert_eq!(requests(&[("XWARP_PEER_TO_PEER", "off")]), [without_mode, ONE]);
}
