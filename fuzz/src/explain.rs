//! Target: `xwarp explain`. An input is options, then a capture file. With the first bit set, frames follow instead,
//! from which a file is built, so that mutations of lengths in the file's own headers do not hide the frames.

use std::io;

use xwarp_tool::explain::{Options, explain};

use crate::input::Input;

const FRAMES: u8 = 1;
const JSON: u8 = 2;
const DESCRIBE: u8 = 4;
const ALL: u8 = 8;

/// Runs one input.
pub fn target(data: &[u8]) {
    let mut input = Input::new(data);
    let flags = input.u8();
    let file = if flags & FRAMES != 0 { pcap(input) } else { input.rest().to_vec() };
    let options = Options {
        json: flags & JSON != 0,
        frames: flags & DESCRIBE != 0,
        all: flags & ALL != 0,
        ..Options::default()
    };
    explain(&file[..], options, &mut io::sink()).expect("a sink accepts everything").ok();
}

/// A pcap file: the link type, then frames, each with its length in two bytes and the milliseconds since the last.
fn pcap(mut input: Input<'_>) -> Vec<u8> {
    let link = [1_u32, 101, 113, 276][usize::from(input.u8() & 3)];
    let mut file = vec![0xa1, 0xb2, 0xc3, 0xd4, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];
    file.extend_from_slice(&link.to_be_bytes());
    let mut milliseconds = 0_u32;
    while !input.is_empty() {
        milliseconds += u32::from(input.u8());
        let len = usize::from(input.u16());
        let frame = input.bytes(len).to_vec();
        let len = frame.len() as u32;
        for field in [milliseconds / 1000, milliseconds % 1000 * 1000, len, len] {
            file.extend_from_slice(&field.to_be_bytes());
        }
        file.extend_from_slice(&frame);
    }
    file
}
