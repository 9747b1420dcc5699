//! A hostile client of `xwarpd` that passes it sockets whose closing takes an hour.

use std::{
    io::{ErrorKind, Write as _},
    iter::repeat_n,
    net::{TcpListener, TcpStream},
    os::fd::AsFd as _,
    path::Path,
    sync::mpsc::channel,
    thread,
    time::Duration,
};

use anyhow::Result;
use rustix::{io::Errno, net::sockopt};
use xwarp_control::{Request, Tagged};
use xwarp_leg::message::send_message;

use crate::{granted::opened, raw::Raw};

/// Descriptors that are passed: more than one user may have connections.
const PASSED: usize = 40;
/// Time for which closing waits.
const LINGER: Duration = Duration::from_hours(1);
/// Time for all to be passed; this process may wait for some of them, too.
const LIMIT: Duration = Duration::from_secs(2);

/// Passes them with requests (`requests`), unread by the helper (`unread`), or before the helper has accepted the connection
/// (`early`), and waits to be killed.
pub(crate) fn run(way: &str) -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    // While these do not read, the other ends have unsent data.
    let mut unread = Vec::new();
    let (passes, passed) = channel();
    for _ in 0..PASSED {
        let stream = TcpStream::connect(listener.local_addr()?)?;
        unread.push(listener.accept()?.0);
        let (passes, early, times) = (passes.clone(), way == "early", if way == "unread" { 20 } else { 1 });
        thread::spawn(move || {
            let _ = passes.send(pass(stream, early, times));
        });
    }
    let count = (0..PASSED).map_while(|_| passed.recv_timeout(LIMIT).ok()).flatten().count();
    println!("passed {count} sockets");
    thread::sleep(LINGER);
    Ok(())
}

/// Fills a socket whose other end does not read, so that closing it takes long.
fn lingers(stream: &mut TcpStream) -> Result<()> {
    stream.set_nonblocking(true)?;
    loop {
        match stream.write(&[0; 1 << 13]) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            written => drop(written?),
        }
    }
    Ok(sockopt::set_socket_linger(&*stream, Some(LINGER))?)
}

/// Opens a device and, when the file `go` is there, sends what a helper should not get: nonsense (`junk`), empty messages with such
/// sockets (`empty`), requests with such sockets (`linger`), and the same before it hangs up itself (`leave`).
pub(crate) fn meanwhile(way: &str, go: &Path) -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut stream = TcpStream::connect(listener.local_addr()?)?;
    let _unread = listener.accept()?.0;
    lingers(&mut stream)?;
    let raw = Raw::greeted()?;
    let _device = opened(&raw)?;
    println!("opened");
    while !go.exists() {
        thread::sleep(Duration::from_millis(5));
    }
    let (junk, release) =
        ([0xff; 64], Tagged { id: 7, body: Request::Release { address: None, port: 9 } }.encode());
    let message: &[u8] = match way {
        "junk" => &junk,
        "empty" => &[],
        _ => &release,
    };
    let descriptors = if way == "junk" { vec![] } else { vec![stream.as_fd()] };
    let most = if way == "leave" { usize::MAX } else { 100 };
    for _ in 0..most {
        match send_message(raw.socket().as_fd(), message, &descriptors) {
            Ok(()) => {}
            Err(Errno::AGAIN | Errno::TOOMANYREFS) => break,
            other => other?,
        }
    }
    if way == "linger" {
        send_message(raw.socket().as_fd(), &junk, &[])?;
    }
    println!("sent");
    if way != "leave" {
        while !raw.receive()?.0.is_empty() {}
    }
    println!("hung up");
    Ok(())
}

/// Passes a socket `times` times to the helper, on one connection.
fn pass(mut stream: TcpStream, early: bool, times: usize) -> Result<()> {
    lingers(&mut stream)?;
    let raw = if early { Raw::connect() } else { Raw::greeted() }?;
    // Requests before it keep the helper busy until this process has closed its own descriptor.
    for descriptor in repeat_n(None, 30).chain(repeat_n(Some(stream.as_fd()), times)) {
        if raw.send(Request::Release { address: None, port: 9 }, descriptor).is_err() {
            break;
        }
    }
    // Either the helper or this thread, whichever is later, closes the last one.
    drop(stream);
    Ok(())
}
