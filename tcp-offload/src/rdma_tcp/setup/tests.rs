//! Connect, Accept and Reject between two ends, and hostile first messages.
#![expect(clippy::indexing_slicing, reason = "a test that is wrong may panic")]

use super::*;
use crate::framing::Offer;

/// An end whose Connection ID, if it is the client, has this low byte, and so has its first message number.
fn end(byte: u8, max_ird: u16) -> Setup {
    let random = u128::from(byte) << 64 | u128::from(byte) | 0xffff_ff00;
    Setup { config: RdmaTcpConfig { max_ird, ..RdmaTcpConfig::default() }, random }
}

fn accept_params(ird: u16, ord: u16, private_data: &[u8]) -> AcceptParams {
    AcceptParams { ird, ord, private_data: private_data.to_vec() }
}

/// The CRC of a changed message, by the algorithm of the study's table.
fn mend(bytes: &mut [u8]) {
    let at = bytes.len() - 4;
    let mut register = u32::MAX;
    for byte in &bytes[..at] {
        register ^= u32::from(*byte);
        for _ in 0..8 {
            register = register >> 1 ^ if register & 1 == 1 { 0x8260_8edb } else { 0 };
        }
    }
    bytes[at..].copy_from_slice(&(!register).to_le_bytes());
}

/// IRD and ORD that client and server ask for, and those of client and server after the negotiation.
type Depths = ([u16; 2], [u16; 2], [[u16; 2]; 2]);

#[test]
fn rdma_tcp_a5_both_ends_agree_on_read_depths() {
    let cases: [Depths; 5] = [
        ([4, 8], [16, 2], [[4, 8], [16, 2]]),
        // ORD is at most the other end's IRD.
        ([4, 8], [2, 16], [[4, 2], [2, 4]]),
        ([0, 0], [0, 0], [[0, 0], [0, 0]]),
        ([0, 4], [4, 4], [[0, 4], [4, 0]]),
        ([MAX_READ_DEPTH; 2], [MAX_READ_DEPTH; 2], [[MAX_READ_DEPTH; 2]; 2]),
    ];
    for ([ird, ord], [their_ird, their_ord], expected) in cases {
        let (client, server) = (end(0xa1, 128), end(0xb2, 128));
        let (asked, connect) = client.request(b"hello".to_vec(), ird, ord).unwrap();
        let (offer, len) = server.parse_request(&connect).unwrap().unwrap();
        assert_eq!(
            (len, &offer.private_data[..], offer.ird, offer.ord),
            (connect.len(), &b"hello"[..], ird, ord)
        );
        assert_eq!(Offer::from(offer.clone()).into_private_data(), b"hello");
        let (accept, full) =
            server.accept(&offer, accept_params(their_ird, their_ord, b"welcome"), 0).unwrap();
        let (answer, len) = client.parse_answer(&asked, &accept, 0).unwrap().unwrap();
        assert_eq!(len, accept.len());
        let Answer::Accepted { full: ours, private_data } = answer else { panic!("{answer:?}") };
        assert_eq!(private_data, b"welcome");
        let [client, server] = [ours.agreed, full.agreed].map(|agreed| {
            let framing::Agreed::RdmaTcp(agreed) = agreed else { panic!("{agreed:?}") };
            agreed
        });
        let depths = [client, server].map(|agreed| [agreed.ird, agreed.ord]);
        assert_eq!(depths, expected, "{ird} {ord} {their_ird} {their_ord}");
        // A12, A15: one Connection ID, and each direction has its own numbers.
        assert_eq!((client.connection, server.connection), (ConnectionId(0xa1), ConnectionId(0xa1)));
        assert_eq!(client.next_sent, MessageNumber(0xffff_ffa2));
        assert_eq!((client.next_sent, client.next_received), (server.next_received, server.next_sent));
    }
}

/// The server's ORD raises the client's IRD, up to the client's limit.
#[test]
fn rdma_tcp_a5_a_client_terminates_when_the_servers_ord_is_too_large() {
    for (max_ird, terminates) in [(8, false), (7, true)] {
        let client = end(0xa1, max_ird);
        let (asked, _) = client.request(Vec::new(), 4, 4).unwrap();
        let control = SendControl::Accept { ird: 4, ord: 8 };
        let accept = end(0xb2, 0).message(ConnectionId(0xa1), control, &[]);
        match client.parse_answer(&asked, &accept, 0).unwrap().unwrap().0 {
            Answer::Accepted { full, .. } => {
                assert!(!terminates);
                assert_eq!(full.agreed.ird(), 8);
            }
            Answer::Terminate(_, error) => {
                assert!(terminates);
                assert_eq!(error, SegmentError::InsufficientIrd.into());
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn rdma_tcp_a5_a_rejection_carries_private_data() {
    let (client, server) = (end(0xa1, 1), end(0xb2, 1));
    let (asked, connect) = client.request(Vec::new(), 1, 1).unwrap();
    let (offer, _) = server.parse_request(&connect).unwrap().unwrap();
    let most = vec![0x5a; MAX_PRIVATE_DATA];
    let reject = server.reject(&offer, most.clone()).unwrap();
    let (answer, len) = client.parse_answer(&asked, &reject, 0).unwrap().unwrap();
    assert_eq!(len, reject.len());
    assert!(matches!(answer, Answer::Rejected { private_data, .. } if private_data == most));
    let long = vec![0; MAX_PRIVATE_DATA + 1];
    let (len, limit) = (long.len(), MAX_PRIVATE_DATA);
    let too_long = SetupError::PrivateDataTooLong { len, limit };
    assert_eq!(server.reject(&offer, long.clone()), Err(too_long));
    assert_eq!(client.request(long.clone(), 1, 1).unwrap_err(), too_long);
    assert_eq!(server.accept(&offer, accept_params(1, 1, &long), 0).unwrap_err(), too_long);
    let deep = client.request(Vec::new(), MAX_READ_DEPTH + 1, 1).unwrap_err();
    assert_eq!(deep, SetupError::ReadDepth(MAX_READ_DEPTH + 1));
}

/// Every part of a first message is incomplete, and every changed byte is an error, except in fields that may have any value.
#[test]
fn rdma_tcp_a14_first_messages_are_checked() {
    let (client, server) = (end(0xa1, 1), end(0xb2, 1));
    let (asked, connect) = client.request(b"abc".to_vec(), 1, 1).unwrap();
    for len in 0..connect.len() {
        assert!(server.parse_request(&connect[..len]).unwrap().is_none(), "{len} bytes");
    }
    for at in 0..connect.len() {
        let mut changed = connect.clone();
        changed[at] ^= 0x41;
        // A length field that is too large makes the message incomplete; everything else fails the CRC.
        let parsed = server.parse_request(&changed);
        assert!(matches!(parsed, Err(_) | Ok(None)), "byte {at}: {parsed:?}");
    }
    let with = |at: usize, byte: u8| {
        let mut changed = connect.clone();
        changed[at] = byte;
        mend(&mut changed);
        server.parse_request(&changed).map(|parsed| parsed.is_some())
    };
    let error = |error: SegmentError| Err(error.into());
    assert_eq!(with(0, 2), error(SegmentError::Version(2)));
    assert_eq!(with(1, 0x08), error(SegmentError::Control), "Connect is one segment");
    assert_eq!(with(1, 0x0d), error(SegmentError::Control), "a Write has one control word at most");
    assert_eq!(with(1, 0x2c), error(SegmentError::Reserved));
    assert_eq!(with(2, 0xff), error(SegmentError::Setup), "longer than any first message");
    assert_eq!(with(24, 2), error(SegmentError::Setup), "Accept is the server's");
    assert_eq!(with(24, 3), error(SegmentError::Control), "Reject has one word");
    assert_eq!(with(29, 7), Ok(true), "another IRD");
    // The client checks the Connection ID, and the type of the answer.
    assert_eq!(client.parse_answer(&asked, &connect, 0).unwrap_err(), SegmentError::Setup.into());
    let other = server.message(ConnectionId(0xa2), SendControl::Accept { ird: 1, ord: 1 }, &[]);
    assert_eq!(client.parse_answer(&asked, &other, 0).unwrap_err(), SegmentError::ConnectionId.into());
}

/// A20: depths that do not fit into 14 bits.
#[test]
fn rdma_tcp_a20_larger_depths_count_as_the_largest() {
    let (client, server) = (end(0xa1, u16::MAX), end(0xb2, 1));
    let control = SendControl::Connect { ird: u16::MAX, ord: u16::MAX };
    let connect = client.message(ConnectionId(1), control, &[]);
    let (offer, _) = server.parse_request(&connect).unwrap().unwrap();
    assert_eq!((offer.ird, offer.ord), (MAX_READ_DEPTH, MAX_READ_DEPTH));
    let (asked, _) = client.request(Vec::new(), 1, 1).unwrap();
    let control = SendControl::Accept { ird: u16::MAX, ord: u16::MAX };
    let accept = server.message(ConnectionId(0xa1), control, &[]);
    let (answer, _) = client.parse_answer(&asked, &accept, 0).unwrap().unwrap();
    let Answer::Accepted { full, .. } = answer else { panic!("{answer:?}") };
    let depths = [full.agreed.ird(), full.agreed.ord(), full.agreed.peer_ird(), full.agreed.peer_ord()];
    assert_eq!(depths, [MAX_READ_DEPTH, 1, MAX_READ_DEPTH, MAX_READ_DEPTH]);
}
