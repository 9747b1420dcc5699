//! Runs the documented example unchanged, over the in-memory interface.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "../examples/hello/client.rs"]
mod client;
#[path = "../examples/hello/server.rs"]
mod server;

use std::{net::SocketAddr, sync::mpsc, thread};

use xwarp_verbs::{
    Device, DeviceOptions, Progress,
    sim::{self, WireConfig},
};

fn hello(progress: Progress, address: SocketAddr) {
    let (a, b) = sim::pair(WireConfig::default(), 1500).unwrap();
    let open = |end| Device::over(Box::new(end), DeviceOptions { progress, ..Default::default() }).unwrap();
    let (server, client) = (open(a), open(b));
    let (ready, listening) = mpsc::channel();
    thread::scope(|scope| {
        let served = scope.spawn(move || {
            server::serve(&server, address, |at| ready.send(at).unwrap()).map_err(|e| e.to_string())
        });
        let port = listening.recv().unwrap().port();
        let ip = if address.is_ipv4() { sim::ipv4(1) } else { sim::ipv6(1) };
        let answer = client::ask(&client, SocketAddr::new(ip, port), "hello, memory").unwrap();
        assert_eq!(answer, "HELLO, MEMORY");
        assert_eq!(served.join().unwrap().unwrap(), "hello, memory");
    });
}

#[test]
fn the_example_runs_with_a_thread_helping() {
    hello(Progress::Auto, SocketAddr::from(([0, 0, 0, 0], 4791)));
}

#[test]
fn the_example_runs_over_ipv6_and_any_port() {
    hello(Progress::Thread, SocketAddr::new(sim::ipv6(1), 0));
}

#[test]
fn the_example_runs_without_threads_of_ours() {
    hello(Progress::Application, SocketAddr::new(sim::ipv4(1), 0));
}
