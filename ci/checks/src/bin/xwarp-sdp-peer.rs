//! An SDP server that echoes each connection: `xwarp-sdp-peer INTERFACE ADDRESS:PORT [CAPTURE]`.
#![forbid(unsafe_code)]

use std::{env, io, net::SocketAddr, path::PathBuf, thread};

use anyhow::{Context as _, Result};
use xwarp_sdp::{Sdp, SdpListener, SdpOptions};
use xwarp_verbs::{Device, DeviceOptions};

fn main() -> Result<()> {
    let mut args = env::args().skip(1);
    let interface = args.next().context("no interface")?;
    let address: SocketAddr = args.next().context("no address")?.parse()?;
    let options = DeviceOptions { capture: args.next().map(PathBuf::from), ..DeviceOptions::default() };
    let sdp = Sdp::new(&Device::open_with(&interface, options)?, SdpOptions::default())?;
    let listener = SdpListener::bind(&sdp, address)?;
    println!("listens at {address}");
    for stream in listener.incoming() {
        let stream = stream?;
        thread::spawn(move || io::copy(&mut &stream, &mut &stream));
    }
    Ok(())
}
