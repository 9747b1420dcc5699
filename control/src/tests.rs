//! Round trips of every message, every truncation, and golden bytes.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::net::IpAddr;

use proptest::prelude::*;
use xwarp_tcp::wire::Mac;

use super::*;

const MAC: Mac = Mac([2, 0, 0, 0, 0, 7]);

fn v4() -> IpAddr {
    "192.0.2.7".parse().unwrap()
}

fn v6() -> IpAddr {
    "2001:db8::7".parse().unwrap()
}

fn requests() -> Vec<Request> {
    let sizes = Sizes { receive_chunks: 1024, transmit_chunks: 2048, ring: 1024 };
    vec![
        Request::Hello { version: VERSION },
        Request::Open { interface: Choice::Name("eth0".into()), sizes },
        Request::Open { interface: Choice::Address(v6()), sizes },
        Request::Register,
        Request::Reserve { address: None, port: 0 },
        Request::Reserve { address: Some(v4()), port: 4791 },
        Request::Release { address: Some(v6()), port: 4791 },
        Request::Resolve { destination: v4(), source: None },
        Request::Resolve { destination: v6(), source: Some(v6()) },
        Request::NextHop {
            destination: v4(),
            source: v4(),
            destination_port: 4791,
            source_port: 49152,
            confirm: true,
        },
        Request::Describe { number: 3 },
        Request::Host { name: "node-7".into(), join: true },
        Request::Faults { from: "a".into(), to: "b".into(), words: "loss 3%".into() },
    ]
}

fn device() -> Device {
    Device {
        name: "eth0.42".into(),
        carrier: "eth0".into(),
        index: 3,
        socket_index: 4,
        mac: MAC,
        mtu: 9000,
        path_mtu: 9000,
        largest_mtu: 65535,
        up: true,
        hook: Hook::Native,
        multi_buffer: true,
        vlans: vec![7, 42],
        program_id: 77,
        addresses: [v4(), v6()].repeat(MAX_ADDRESSES / 2),
    }
}

fn description() -> Description {
    let quota = |used| Quota { used, most: u64::MAX };
    Description {
        interfaces: 64,
        name: "0123456789abcde".into(),
        carrier: "eth0".into(),
        mtu: 9000,
        up: true,
        hook: Hook::TrafficControl,
        generic_clients: true,
        devices: 4095,
        own_devices: quota(7),
        own_ports: quota(1024),
        own_memory_bytes: quota(1 << 33),
        counters: vec![("c".repeat(40), u64::MAX); MAX_COUNTERS],
    }
}

fn replies() -> Vec<Reply> {
    vec![
        Reply::Described(description()),
        Reply::Done,
        Reply::Host(Host { number: 7, mac: MAC, addresses: vec![v4(), v6()] }),
        Reply::Hello { version: VERSION },
        Reply::Opened(device()),
        Reply::Registered,
        Reply::Reserved { port: 4791 },
        Reply::Resolved { source: v4(), next_hop: v4(), neighbour: Neighbour::Known(MAC), mtu: 1500 },
        Reply::Resolved { source: v6(), next_hop: v6(), neighbour: Neighbour::Pending, mtu: 1500 },
        Reply::Resolved { source: v6(), next_hop: v4(), neighbour: Neighbour::Failed, mtu: 68 },
        Reply::NextHop { address: v6(), mac: None, mtu: 1280 },
        Reply::NextHop { address: v6(), mac: Some(MAC), mtu: 65535 },
        Reply::Refused(Refusal { reason: Reason::Version, text: "a".repeat(512) }),
        Reply::Refused(Refusal { reason: Reason::System, text: String::new() }),
    ]
}

fn events() -> Vec<Event> {
    vec![
        Event::AddressAdded(v4()),
        Event::AddressRemoved(v6()),
        Event::LinkState { up: true },
        Event::Mtu(9000),
        Event::Mac(MAC),
        Event::LinkRemoved,
        Event::Neighbour { address: v4(), mac: MAC },
        Event::Routes,
        Event::Restarted,
        Event::Revoked { text: "the interface was removed".into() },
    ]
}

/// Checks that `bytes` decode to `message`, and that no shorter and no longer message does.
fn check<T: PartialEq + std::fmt::Debug>(
    message: &T,
    bytes: &[u8],
    decode: impl Fn(&[u8]) -> Result<T, DecodeError>,
) {
    assert!(bytes.len() <= MAX_BYTES);
    assert_eq!(decode(bytes).as_ref(), Ok(message));
    for len in 0..bytes.len() {
        assert!(decode(&bytes[..len]).is_err(), "{message:?} cut to {len} bytes");
    }
    assert_eq!(decode(&[bytes, &[0]].concat()), Err(DecodeError::Long), "{message:?} and a byte");
}

#[test]
fn messages_round_trip_and_no_part_of_one_is_a_message() {
    for body in requests() {
        let message = Tagged { id: 0xfeed_beef, body };
        check(&message, &message.encode(), Tagged::<Request>::decode);
    }
    for body in replies() {
        let message = Tagged { id: 7, body };
        check(&message, &message.encode(), Tagged::<Reply>::decode);
    }
    for event in events() {
        check(&event, &event.encode(), Event::decode);
    }
}

#[test]
fn a_request_has_these_bytes() {
    let message = Tagged { id: 5, body: Request::Reserve { address: Some(v4()), port: 4791 } };
    assert_eq!(message.encode(), [5, 0, 0, 0, 3, 4, 192, 0, 2, 7, 0xb7, 0x12]);
    let sizes = Sizes { receive_chunks: 1, transmit_chunks: 2, ring: 4 };
    let message = Tagged { id: 1, body: Request::Open { interface: Choice::Name("e0".into()), sizes } };
    let expected = [1, 0, 0, 0, 2, 0, 2, 0, b'e', b'0', 1, 0, 0, 0, 2, 0, 0, 0, 4, 0, 0, 0];
    assert_eq!(message.encode(), expected);
}

#[test]
fn fields_out_of_range_are_refused() {
    let decode = Tagged::<Request>::decode;
    assert_eq!(decode(&[1, 0, 0, 0, 99]), Err(DecodeError::Invalid("kind of request")));
    // An address of a third family; an interface name with a line break, and one that is too long.
    assert_eq!(decode(&[1, 0, 0, 0, 3, 5, 0, 0]), Err(DecodeError::Invalid("address family")));
    let name = |name: &[u8]| {
        let mut bytes = vec![1, 0, 0, 0, 2, 0, name.len() as u8, 0];
        bytes.extend(name);
        bytes.extend([0; 12]);
        decode(&bytes)
    };
    assert!(name(b"eth0").is_ok());
    for wrong in [&b"et\nh0"[..], b"0123456789abcdef", b"\xff"] {
        assert_eq!(name(wrong), Err(DecodeError::Invalid("interface name")));
    }
    let mut long = Tagged { id: 1, body: Request::Hello { version: 1 } }.encode();
    long.resize(MAX_BYTES + 1, 0);
    assert_eq!(decode(&long), Err(DecodeError::Long));
}

#[test]
fn a_long_text_is_cut_at_a_character() {
    let text = "é".repeat(400);
    let message = Tagged { id: 1, body: Reply::Refused(Refusal { reason: Reason::Limit, text }) };
    let Reply::Refused(refusal) = Tagged::<Reply>::decode(&message.encode()).unwrap().body else {
        panic!("it was a refusal")
    };
    assert_eq!(refusal.text, "é".repeat(256));
}

proptest! {
    /// Whatever decodes has exactly one encoding.
    #[test]
    fn prop_decoding_is_exact(bytes in proptest::collection::vec(0u8..8, 0..64)) {
        if let Ok(message) = Tagged::<Request>::decode(&bytes) {
            prop_assert_eq!(message.encode(), bytes.clone());
        }
        if let Ok(message) = Tagged::<Reply>::decode(&bytes) {
            prop_assert_eq!(message.encode(), bytes.clone());
        }
        if let Ok(event) = Event::decode(&bytes) {
            prop_assert_eq!(event.encode(), bytes);
        }
    }
}
