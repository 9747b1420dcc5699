//! A hostile client of `xwarpd` that passes it sockets whose closing takes an hour.

use std::{
    io::{ErrorKind, Write as _},
    iter::repeat_n,
    net::{TcpListener, TcpStream},
    os::fd::AsFd as _,
    sync::mpsc::channel,
    thread,
    time::Duration,
};

use anyhow::Result;
use rustix::net::sockopt;
use xwarp_control::Request;

use crate::raw::Raw;

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

/// Passes a socket `times` times to the helper, on one connection.
fn pass(mut stream: TcpStream, early: bool, times: usize) -> Result<()> {
    stream.set_nonblocking(true)?;
    loop {
        match stream.write(&[0; 1 << 13]) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            written => drop(written?),
        }
    }
    sockopt::set_socket_linger(&stream, Some(LINGER))?;
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
