//! Target: the messages between a process and `xwarpd`.
//!
//! An input is: the side (0: a request, 1: a reply, 2: an event), the message. Whatever is decoded has exactly one encoding,
//! and no part of it is a message.

use xwarp_control::{DecodeError, Event, MAX_BYTES, Reply, Request, Tagged};

use crate::input::Input;

/// Runs one input.
pub fn target(data: &[u8]) {
    let mut input = Input::new(data);
    match input.u8() % 3 {
        0 => check(input.rest(), Tagged::<Request>::decode, Tagged::<Request>::encode),
        1 => check(input.rest(), Tagged::<Reply>::decode, Tagged::<Reply>::encode),
        _ => check(input.rest(), Event::decode, Event::encode),
    }
}

fn check<T>(bytes: &[u8], decode: impl Fn(&[u8]) -> Result<T, DecodeError>, encode: impl Fn(&T) -> Vec<u8>) {
    let Ok(message) = decode(bytes) else { return };
    assert!(bytes.len() <= MAX_BYTES, "a message of {} bytes was accepted", bytes.len());
    assert_eq!(encode(&message), bytes, "the encoding differs");
    for len in 0..bytes.len() {
        assert!(decode(&bytes[..len]).is_err(), "{len} bytes of the message are a message too");
    }
}
