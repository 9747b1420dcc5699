//! An owner of a connection over SDP that moves from one process to another, by a UNIX socket:
//! `xwarp-sdp-owner listens|connects|second INTERFACE ADDRESS:PORT SOCKET RECEIVED CAPTURE`. The first one, which listens at the address or
//! connects to it, reads 100 000 bytes. The second one, which has the address without the port, reads the rest.
#![forbid(unsafe_code)]

use std::{
    env, fs,
    io::{Read as _, Write as _},
    net::{Shutdown, SocketAddr},
    os::unix::net::{UnixListener, UnixStream},
    path::PathBuf,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use xwarp_sdp::{Sdp, SdpListener, SdpOptions, SdpStream, Successor};
use xwarp_verbs::{Device, DeviceOptions};

const LIMIT: Duration = Duration::from_secs(20);

fn main() -> Result<()> {
    let mut args = env::args().skip(1);
    let mut next = || args.next().context("too few arguments");
    let (role, interface, address) = (next()?, next()?, next()?.parse::<SocketAddr>()?);
    let [socket, received, capture] = [next()?, next()?, next()?].map(PathBuf::from);
    let options = DeviceOptions { capture: Some(capture), ..DeviceOptions::default() };
    let sdp = Sdp::new(&Device::open_with(&interface, options)?, SdpOptions::default())?;
    match &*role {
        "listens" | "connects" => {
            let stream = if role == "listens" {
                let listener = SdpListener::bind(&sdp, address)?;
                println!("ready");
                listener.accept()?.0
            } else {
                println!("ready");
                SdpStream::connect_timeout(&sdp, address, LIMIT)?
            };
            stream.set_read_timeout(Some(LIMIT))?;
            let mut part = vec![0; 100_000];
            (&stream).read_exact(&mut part)?;
            fs::write(received, part)?;
            (&stream).write_all(b"first, ")?;
            let mut second = UnixStream::connect(socket)?;
            let mut port = [0; 2];
            second.read_exact(&mut port)?;
            second.write_all(&stream.suspend(u16::from_be_bytes(port))?)?;
        }
        "second" => {
            let successor = Successor::bind(&sdp, address.ip())?;
            let listener = UnixListener::bind(socket)?;
            println!("ready");
            let (mut first, _) = listener.accept()?;
            first.write_all(&successor.port()?.to_be_bytes())?;
            let mut state = Vec::new();
            first.read_to_end(&mut state)?;
            let stream = successor.resume(&state)?;
            println!("has the connection of {}", stream.local_addr()?);
            stream.set_read_timeout(Some(LIMIT))?;
            let mut rest = Vec::new();
            (&stream).read_to_end(&mut rest)?;
            fs::write(received, rest)?;
            (&stream).write_all(b"second")?;
            stream.shutdown(Shutdown::Write)?;
            stream.wait_closed()?;
        }
        _ => bail!("no such role: {role}"),
    }
    Ok(())
}
